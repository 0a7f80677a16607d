"""The router's load-balancing loss of a mixture of experts, for each sequence.

A layer's loss of one sequence of T tokens is E/(K·T²) · Σ_e n_e · Σ_t p_te, with n_e the times that expert e is among
the K chosen and p the softmax over all E experts: 1 where they are used evenly. This is the loss of the Switch
Transformer (https://arxiv.org/abs/2101.03961) over the tokens of a sequence (DeepSeek-V3, equations 17 to 20,
https://arxiv.org/abs/2412.19437). A step's is the mean over the sequences that have a live token. Megatron's own is
over the tokens of a micro-batch, and so another one for each way to cut a step; with its `calculate_per_token_loss` it
is multiplied by their number, too, which only a division by the step's tokens takes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from rlpost.parallel import sum_over_ranks
from rlpost.policy.overlap import finish_gather

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from rlpost.parallel import Mesh
    from rlpost.policy.tokens import LocalTokens
    from rlpost.types import MicroBatch


class RouterBalance:
    """Adds `coefficient` times the loss of every layer to what the backward of `model`'s layers computes.

    In the order of calls: `watch` once for each chunk of the model; `begin` of a step; `sequences` of each of its
    micro-batches, whose result the micro-batch's tokens bring to the layers; `total` at the end.
    """

    def __init__(self, coefficient: float, mesh: Mesh) -> None:
        self.coefficient, self._mesh = coefficient, mesh
        self._packed: Any = None  # of the layer that runs
        self._live = 0.0  # sequences of the step
        self._total: Tensor | float = 0.0

    def watch(self, chunk: DistributedDataParallel) -> None:
        for layer in chunk.module.decoder.layers:
            # The whole layer is called again where all of it is recomputed, in the backward of any micro-batch.
            layer.register_forward_pre_hook(self._enter, with_kwargs=True)
            layer.mlp.register_forward_pre_hook(partial(self._attach, chunk))

    def begin(self, micros: Sequence[MicroBatch]) -> None:
        """Collective over the data-parallel ranks."""
        live = sum(float((_live_tokens(micro) > 0).sum()) for micro in micros)
        self._live = sum_over_ranks({"live": live}, self._mesh.dp.group)["live"]
        self._total = 0.0

    def sequences(self, tokens: LocalTokens, micro: MicroBatch, sequence_parallel: bool) -> Tensor:
        """[B, T]: the weight of a token of this rank in each sequence's loss, but for the constants of the model; a
        prompt that several sequences share counts in each."""
        lengths_B = micro.cu_seqlens.diff().cpu()
        here = len(tokens.input_ids_T)
        table_BT = torch.zeros(len(lengths_B), here)
        sequence_M = torch.arange(len(lengths_B)).repeat_interleave(lengths_B)
        place_M = tokens.place_M - self._mesh.cp.rank * here
        mine_M = (place_M >= 0) & (place_M < here)
        live_B = (_live_tokens(micro) > 0).float() / max(1.0, self._live)
        # Counts and probabilities each bring this weight, so its square is the 1 / T² of the mean over sequences.
        table_BT[sequence_M[mine_M], place_M[mine_M]] = (live_B.sqrt() / lengths_B)[sequence_M[mine_M]]
        if sequence_parallel:
            table_BT = table_BT.chunk(self._mesh.tp.size, dim=1)[self._mesh.tp.rank]
        return table_BT.contiguous()

    def total(self, layers: int) -> float:
        """The step's loss, the mean over the layers of the model, without the coefficient. Collective."""
        return sum_over_ranks({"loss": float(self._total)})["loss"] / layers

    def _enter(self, layer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self._packed = kwargs["packed_seq_params"]

    def _attach(self, chunk: DistributedDataParallel, mlp: Any, args: tuple) -> tuple | None:
        table_BT = self._packed.tokens.balance_BT
        if not torch.is_grad_enabled() or table_BT is None:  # scoring, or the first pass of what is recomputed
            return None
        hidden, *rest = args
        finish_gather(chunk, mlp.router.weight)
        experts, chosen = mlp.config.num_moe_experts, mlp.config.moe_router_topk
        probs_TE = mlp.router.gating(hidden).flatten(0, -2).float().softmax(-1)
        with torch.no_grad():
            chosen_TE = F.one_hot(probs_TE.topk(chosen, dim=-1).indices, experts).sum(1).float()
            count_BE = table_BT @ chosen_TE
            dist.all_reduce(count_BE, group=mlp.router.tp_cp_group)
        loss = experts / chosen * (count_BE * (table_BT @ probs_TE)).sum()
        self._total = self._total + loss.detach()
        return MoEAuxLossAutoScaler.apply(hidden, self.coefficient * loss), *rest


def _live_tokens(micro: MicroBatch) -> Tensor:
    """[B]: of each sequence, on the CPU. None of a filler's."""
    live_B = torch.zeros(len(micro.cu_seqlens) - 1)
    if len(micro.target_N):
        live_B.index_add_(0, micro.sequence_N.cpu(), (micro.fields["loss_mask"] > 0).float().cpu())
    return live_B
