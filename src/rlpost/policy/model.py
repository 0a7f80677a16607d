"""A Hugging Face model as Megatron-core runs it on all ranks: packed micro-batches, its schedules, scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlpost import parallel as ranks
from rlpost.config.schema import ModelConfig, ParallelConfig
from rlpost.policy.balance import RouterBalance
from rlpost.policy.build import build_model
from rlpost.policy.cpu import megatron_device
from rlpost.policy.hf_config import DTYPES, make_map, read_config
from rlpost.policy.logits import Head
from rlpost.policy.overlap import finish_gathers, reduce_at_the_last_micro_batch
from rlpost.policy.tokens import LocalTokens, every_token_counts, filler, local_tokens
from rlpost.policy.value_head import ValueHead
from rlpost.residents import Moved
from rlpost.types import MicroBatch

ScoreFn = Callable[[Any, MicroBatch], dict[str, Tensor]]  # of a Head, or of a critic's ValueHead


class MegatronModel:
    """A Hugging Face model on all ranks of the job, as far as scoring needs it. Its weights are not read yet.

    trainable: with gradient buffers beside the weights. seed: of Megatron's random states, None to leave them alone.
    Otherwise as `MegatronPolicy`, and it raises the same.
    """

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        *,
        temperature: float = 1.0,
        trainable: bool = False,
        recompute: str = "none",
        overlap: bool = False,
        seed: int | None = None,
        value_head: bool = False,
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature={temperature}: training needs one above 0")
        self.config, self.temperature = model, temperature
        self.hf_config = read_config(model.path)
        self.mesh = ranks.Mesh.build(parallel)
        self.device, self.has_value_head = ranks.device(), value_head
        self._map = make_map(self.hf_config)
        self._sequence_parallel, self._overlap = parallel.sequence, overlap
        with megatron_device():
            if seed is not None:
                random_state = torch.get_rng_state()
                model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
                torch.set_rng_state(random_state)
            kind = {"trainable": trainable, "value_head": value_head, "overlap": overlap}
            chunks = build_model(self.hf_config, model, parallel, recompute, **kind)
            self._chunks = [chunk.to(self.device) for chunk in chunks]
        weights = Moved("the model's weights", lambda: (p for chunk in self._chunks for p in chunk.parameters()))
        self.residents = {"weights": weights}  # what can leave the device
        if overlap:
            reduce_at_the_last_micro_batch(self._chunks)
        self._balance = RouterBalance(model.router_aux_loss, self.mesh) if model.router_aux_loss and trainable else None
        if self._balance:
            for chunk in self._chunks:
                self._balance.watch(chunk)

    def _run(self, micros: Sequence[MicroBatch], reduce: Callable[..., Any], forward_only: bool) -> list[Any]:
        """Megatron's schedule over the micro-batches; `reduce(hidden, tokens, micro)` is the last stage's work on each.

        The results of the last stage's ranks; of the others none.
        """
        self._require("weights")
        if not micros:
            raise ValueError("a step needs at least one micro-batch on every rank; a filler will do")
        fillers = [filler()] * (-len(micros) % self.micro_batch_multiple)
        multiple = self.mesh.tp.size if self._sequence_parallel else 1
        longest = 0
        if len(self._chunks) > 1:
            longest = max(len(local_tokens(micro, self.mesh.cp, multiple).input_ids_T) for micro in micros)
        context_group = self.mesh.cp.group if self.mesh.cp.size > 1 else None

        def forward_step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            micro = next(iterator)
            tokens = local_tokens(micro, self.mesh.cp, multiple, longest)
            if not forward_only:
                tokens.all_count = self.device.type == "cuda" and every_token_counts(micro)
            if self._balance and not forward_only:
                tokens.balance_BT = self._balance.sequences(tokens, micro, self._sequence_parallel)
            tokens = tokens.to(self.device)

            def collect(hidden: Tensor, non_loss_data: bool = False) -> Any:
                return reduce(hidden, tokens, micro.to(self.device))

            return model.module.forward_packed(tokens, context_group), collect

        iterators = [iter([*micros, *fillers]) for _ in self._chunks]
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks,
            num_microbatches=len(micros) + len(fillers),
            seq_length=longest * self.mesh.cp.size,  # read with virtual stages alone; others tell each other
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results[: len(micros)]

    def _require(self, *names: str) -> None:
        for name in names:
            self.residents[name].require()

    @property
    def transformer_config(self) -> TransformerConfig:
        """Megatron's configuration of this rank's model, resolved."""
        return self._chunks[0].config

    @property
    def micro_batch_multiple(self) -> int:
        """The schedule fills up to a multiple of this number of micro-batches: with virtual stages, the stages."""
        return self.mesh.pp.size if len(self._chunks) > 1 else 1

    def _head(self, hidden: Tensor, tokens: LocalTokens) -> Head | ValueHead:
        """The head over the positions that predict a response token. Prompt tokens cost no logits.

        Each tensor-parallel rank has the logits of its own vocabulary rows, so its gradient with respect to the
        hidden states is a part of the sum: Megatron's two regions add the parts up in the backward. A value head is
        whole on every rank, and so is its gradient.
        """
        vocabulary_cut = not self.has_value_head
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=vocabulary_cut, group=self.mesh.tp.group
            )
        if self.mesh.cp.size > 1:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self.mesh.cp.group
            )
        rows_NH = hidden.squeeze(1).index_select(0, tokens.predict_R)
        if self.has_value_head:
            return ValueHead(rows_NH, self._chunks[-1].module.value_head)
        if not self._sequence_parallel:
            rows_NH = copy_to_tensor_model_parallel_region(rows_NH, group=self.mesh.tp.group)
        weight = self.head_weight()
        return Head(
            rows_NH,
            weight,
            temperature=self.temperature,
            vocab_size=self._map.vocab_size,
            tp_group=self.mesh.tp.group if self.mesh.tp.size > 1 else None,
            chunk_tokens=self.config.head_chunk_tokens,
            skip_rows=not tokens.all_count,
            weight_grad_VH=None if self._overlap else getattr(weight, "main_grad", None),
        )

    @torch.no_grad()
    def score(self, micros: Sequence[MicroBatch], fn: ScoreFn) -> list[dict[str, Tensor]]:
        """Forward only; see `Policy.score`. Collective."""
        with megatron_device():
            for chunk in self._chunks:
                chunk.eval()
            results = self._run(micros, partial(self._score_one, fn), forward_only=True)
        pp = self.mesh.pp
        if pp.size == 1:
            return results
        return ranks.broadcast_tensors(results, pp.global_rank(pp.size - 1), pp.group, self.device)

    def _score_one(self, fn: ScoreFn, hidden: Tensor, tokens: LocalTokens, micro: MicroBatch) -> dict[str, Tensor]:
        """fn's results [N, …], on every context rank all of them."""
        if len(micro.target_N) == 0:  # a filler
            return {}
        if tokens.rows_R is None:
            return fn(self._head(hidden, tokens), micro)
        own = len(tokens.rows_R)
        if own == 0:  # a row of another rank tells the names and shapes
            tokens = replace(tokens, rows_R=torch.zeros(1, dtype=torch.int64, device=self.device))
        whole = {}
        for name, value in fn(self._head(hidden, tokens), tokens.losses_of(micro)).items():
            whole[name] = value.new_zeros(len(micro.target_N), *value.shape[1:])
            whole[name][tokens.rows_R[:own]] = value[:own]
            dist.all_reduce(whole[name], group=self.mesh.cp.group)
        return whole

    def head_weight(self) -> Tensor | None:
        """The live output head [padded V / TP, H]; the embedding where they are tied. None but on the last stage."""
        finish_gathers(self._chunks)
        return self._chunks[-1].module.head_weight()

    def weight_bytes(self) -> int:
        """Of this rank's weights in the dtype that they run in."""
        parameters = sum(p.numel() for chunk in self._chunks for p in chunk.module.parameters())
        return parameters * DTYPES[self.config.dtype].itemsize
