"""A dense layer as two functions around its attention, which CUDA runs compiled.

Module by module, a layer's forward and backward are some hundred kernels, and Python takes longer to launch them than
a fast GPU to run them. Compiled, norms, rotation, SwiGLU and residuals become a few kernels beside the matrix products,
and the compiler chooses which activations it keeps and which it computes again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from rlpost.policy.attention import PackedSequences
from rlpost.policy.tiles import fused


class CompiledLayer(TransformerLayer):
    """Megatron's layer with its parameters, for dense models that no tensor parallelism cuts. What Megatron hangs on
    the forward of single modules (recomputation of some, gathering of their weights) does not happen."""

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: PackedSequences, **_: Any
    ) -> tuple[Tensor, None]:
        """[T, 1, H] → [T, 1, H]"""
        attention, mlp, packed = self.self_attention, self.mlp, packed_seq_params
        hidden_TH = hidden_states.squeeze(1)
        if hidden_TH.is_cuda:
            for tensor in (hidden_TH, packed.cos_TD, packed.sin_TD):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)  # or every new number of tokens would compile anew
        norms = (attention.q_layernorm, attention.k_layernorm) if self.config.qk_layernorm else ()
        query_THD, key_TGD, value_TGD = before_attention(
            hidden_TH,
            self.input_layernorm.weight,
            attention.linear_qkv.weight,
            attention.linear_qkv.bias,
            tuple(norm.weight for norm in norms),
            packed.cos_TD,
            packed.sin_TD,
            attention.num_query_groups_per_partition,
            self.config.layernorm_epsilon,
        )
        out_TH = after_attention(
            hidden_TH,
            attention.core_attention.attend(query_THD, key_TGD, value_TGD, packed),
            attention.linear_proj.weight,
            self.pre_mlp_layernorm.weight,
            mlp.linear_fc1.weight,
            mlp.linear_fc2.weight,
            self.config.layernorm_epsilon,
        )
        return out_TH.unsqueeze(1), None


@fused
def before_attention(
    hidden_TH: Tensor,
    norm_H: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    head_norms: tuple[Tensor, ...],
    cos_TD: Tensor,
    sin_TD: Tensor,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, projection, norms of queries and keys ([head_dim] each; empty without them), rotation: queries [T, heads,
    head_dim], keys and values [T, groups, head_dim]. The projection's rows are, for each group, its heads' queries, its
    key, its value. cos_TD, sin_TD: [T, head_dim / 2]."""
    normed_TH = F.rms_norm(hidden_TH, norm_H.shape, norm_H, eps)
    dim = 2 * cos_TD.shape[1]
    qkv_TGRD = F.linear(normed_TH, qkv_weight, qkv_bias).unflatten(1, (groups, -1, dim))
    query_THD = qkv_TGRD[:, :, :-2].flatten(1, 2)
    key_TGD, value_TGD = qkv_TGRD[:, :, -2], qkv_TGRD[:, :, -1].contiguous()
    if head_norms:
        query_THD, key_TGD = (F.rms_norm(x, w.shape, w, eps) for x, w in zip((query_THD, key_TGD), head_norms))
    return _rotated(query_THD, cos_TD, sin_TD), _rotated(key_TGD, cos_TD, sin_TD), value_TGD


def _rotated(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """As `attention.rotate`, written so that the compiler derives the backward."""
    first, second = x_THD.chunk(2, dim=-1)
    cos, sin = cos_TD.unsqueeze(1), sin_TD.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@fused
def after_attention(
    hidden_TH: Tensor,
    attended_TA: Tensor,
    proj_weight: Tensor,
    norm_H: Tensor,
    fc1_weight: Tensor,
    fc2_weight: Tensor,
    eps: float,
) -> Tensor:
    """Projection, residual, norm, SwiGLU (gate rows before up rows), residual: [T, H]."""
    hidden_TH = hidden_TH + F.linear(attended_TA, proj_weight)
    normed_TH = F.rms_norm(hidden_TH, norm_H.shape, norm_H, eps)
    gate, up = F.linear(normed_TH, fc1_weight).chunk(2, dim=-1)
    return hidden_TH + F.linear(F.silu(gate) * up, fc2_weight)
