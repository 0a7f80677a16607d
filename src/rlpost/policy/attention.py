"""Packed causal attention with its rotary embedding, as the `core_attention` of Megatron's layers.

A packed micro-batch is [T, heads, head_dim] with sequences one after the other (`thd`). Megatron's own rope loops
over the sequences of every layer; here cosines and sines are looked up by position once per micro-batch, and the
rotation happens inside the attention module, so that Megatron's rope is switched off.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with what our attention needs of it."""

    cos_TD: Tensor | None = None  # [T, head_dim / 2], the rotation of each token
    sin_TD: Tensor | None = None
    lengths: list[int] = field(default_factory=list)  # of the sequences, on the host

    @classmethod
    def of(cls, cu_seqlens: Tensor, max_seqlen: int, cos_TD: Tensor, sin_TD: Tensor) -> PackedSequences:
        ends = cu_seqlens.tolist()
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
            cos_TD=cos_TD,
            sin_TD=sin_TD,
            lengths=[end - start for start, end in itertools.pairwise(ends)],
        )


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


def _rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    cos, sin = cos_TD.unsqueeze(1), sin_TD.unsqueeze(1)
    first, second = x_THD.chunk(2, dim=-1)
    out = torch.empty_like(x_THD)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
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
        attend = self._flash if query_THD.is_cuda else self._per_sequence
        return attend(query_THD, key_TGD, value_TGD, packed).flatten(1)

    def _per_sequence(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        pieces = zip(query.split(packed.lengths), key.split(packed.lengths), value.split(packed.lengths))
        outputs = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1).unsqueeze(0) for x in qkv), is_causal=True, scale=self.scale, enable_gqa=True
            )
            for qkv in pieces
        ]
        return torch.cat([out.squeeze(0).transpose(0, 1) for out in outputs])

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        ends, longest = packed.cu_seqlens_q, packed.max_seqlen_q
        options = {"scale": self.scale, "window_size": (-1, 0), "enable_gqa": query.shape[1] != key.shape[1]}
        return varlen_attn(query, key, value, ends, ends, longest, longest, **options)
