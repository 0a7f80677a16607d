"""Packed causal attention with its rotary embedding, as the `core_attention` of Megatron's layers.

A packed micro-batch is [T, heads, head_dim] with sequences one after the other (`thd`). Megatron's own rope loops
over the sequences of every layer; here cosines and sines are looked up by position once per micro-batch, and the
rotation happens inside the attention module, so that Megatron's rope is switched off.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from rlpost.policy.tiles import fused
from rlpost.types import to_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rlpost.policy.tokens import LocalTokens


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with what our attention needs of it."""

    cos_TD: Tensor | None = None  # [T, head_dim / 2], the rotation of each token
    sin_TD: Tensor | None = None
    tokens: LocalTokens | None = None
    context_group: ProcessGroup | None = None  # the ranks that hold the other chunks of the sequences
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # those that the layers share

    @classmethod
    def of(
        cls, tokens: LocalTokens, cos_TD: Tensor, sin_TD: Tensor, context_group: ProcessGroup | None
    ) -> PackedSequences:
        return cls(
            qkv_format="thd",
            cu_seqlens_q=_ends(tokens.query_lengths, cos_TD.device),
            cu_seqlens_kv=_ends(tokens.key_lengths, cos_TD.device),
            max_seqlen_q=max(tokens.query_lengths),
            max_seqlen_kv=max(tokens.key_lengths),
            cos_TD=cos_TD,
            sin_TD=sin_TD,
            tokens=tokens,
            context_group=context_group,
        )

    def mask(self, Q: int, K: int, like: Tensor) -> Tensor:
        """[Q, K] to add to the scores: a later part of a sequence sees all keys before it, so the diagonal ends in the
        last corner."""
        if (Q, K) not in self.masks:
            self.masks[Q, K] = like.new_full((Q, K), -torch.inf).triu(K - Q + 1)
        return self.masks[Q, K]


def _ends(lengths: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), device)


class _Rotate(torch.autograd.Function):
    """Rotary embedding (https://arxiv.org/abs/2104.09864) in the half-split layout of Hugging Face checkpoints.

    A rotation's inverse is its transpose: the backward turns by the opposite angle and needs no saved activation.
    """

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return _rotate(x_THD, cos_TD, sin_TD)

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None, None]:
        cos_TD, sin_TD = ctx.saved_tensors
        return _rotate(grad_THD, cos_TD, -sin_TD), None, None


@fused
def _rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = x_THD.chunk(2, dim=-1)
    sin = sin_TD.unsqueeze(1)
    out = x_THD * torch.cat([cos_TD, cos_TD], dim=-1).unsqueeze(1)
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    return out


class PackedAttention(nn.Module):
    """Megatron's `core_attention`: rotates queries and keys, then causal attention within each sequence.

    On CUDA one varlen flash call; on the CPU one `scaled_dot_product_attention` per sequence.
    """

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale  # None: 1 / sqrt(head_dim)

    def forward(
        self,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """[T, heads, D], [T, groups, D] twice → [T, heads · D]."""
        packed = packed_seq_params
        query_THD = _Rotate.apply(query_THD, packed.cos_TD, packed.sin_TD)
        key_TGD = _Rotate.apply(key_TGD, packed.cos_TD, packed.sin_TD)
        return self.attend(query_THD, key_TGD, value_TGD, packed)

    def attend(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, packed: PackedSequences) -> Tensor:
        """The same of queries and keys that are rotated already."""
        if packed.tokens.keys_K is not None:
            key_TGD, value_TGD = self._of_the_pieces(key_TGD, value_TGD, packed)
        flash = query_THD.is_cuda and query_THD.dtype is not torch.float32  # which flash attention does not know
        attend = self._flash if flash else self._per_sequence
        return attend(query_THD, key_TGD, value_TGD, packed).flatten(1)

    def _of_the_pieces(self, key_TGD: Tensor, value_TGD: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor]:
        """The keys and values that the pieces need, one piece after the other: of a prompt that several share, or of
        all context ranks (the backward sums over the ranks)."""
        where_K = packed.tokens.keys_K
        if packed.context_group is None:
            return key_TGD.index_select(0, where_K), value_TGD.index_select(0, where_K)
        both = torch.cat([key_TGD, value_TGD], dim=-1)
        both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=packed.context_group)
        key, value = both.index_select(0, where_K).split([key_TGD.shape[-1], value_TGD.shape[-1]], dim=-1)
        return key.contiguous(), value.contiguous()

    def _per_sequence(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        queries, keys = packed.tokens.query_lengths, packed.tokens.key_lengths
        outputs = []
        for qkv in zip(query.split(queries), key.split(keys), value.split(keys)):
            Q, K = len(qkv[0]), len(qkv[1])
            mask_QK = None if Q == K else packed.mask(Q, K, query)
            heads_first = (x.transpose(0, 1).unsqueeze(0) for x in qkv)
            outputs.append(
                F.scaled_dot_product_attention(
                    *heads_first, attn_mask=mask_QK, is_causal=Q == K, scale=self.scale, enable_gqa=True
                )
            )
        return torch.cat([out.squeeze(0).transpose(0, 1) for out in outputs])

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        # What torch.nn.attention.varlen wraps in an operator written in Python, which costs .5 ms a layer to launch.
        ends = packed.cu_seqlens_q, packed.cu_seqlens_kv
        longest = packed.max_seqlen_q, packed.max_seqlen_kv
        dropout, causal, debug = 0.0, True, False  # the diagonal ends in the last corner
        flash = torch.ops.aten._flash_attention_forward
        return flash(query, key, value, *ends, *longest, dropout, causal, debug, scale=self.scale)[0]
