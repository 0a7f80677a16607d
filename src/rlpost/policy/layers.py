"""RMSNorm and SwiGLU for Megatron's layers.

On the CPU the composed operators are bound by memory: every one of them writes a fresh tensor of the size of the
activations. Here they run over blocks of rows that stay in the cache, with hand-written backwards that save only
the input. On CUDA RMSNorm is torch's fused one, and Megatron's own fused SwiGLU takes the place of ours.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_ROWS, SWIGLU_ROWS = 512, 64


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_RH = x.reshape(-1, x.shape[-1])
        out_RH = torch.empty_like(x_RH)
        scale_R1 = torch.empty(x_RH.shape[0], 1, dtype=torch.float32)  # 1 / rms
        for x_rows, out, scale in zip(*(t.split(NORM_ROWS) for t in (x_RH, out_RH, scale_R1))):
            rows = x_rows.float()
            torch.linalg.vector_norm(rows, dim=-1, keepdim=True, out=scale)
            scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            out.copy_(rows * scale).mul_(weight)
        ctx.save_for_backward(x_RH, weight, scale_R1)
        return out_RH.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RH, weight, scale_R1 = ctx.saved_tensors
        grad_RH = grad.reshape(x_RH.shape)
        grad_x_RH, grad_weight = torch.empty_like(x_RH), torch.zeros(weight.shape, dtype=torch.float32)
        weight32 = weight.float()
        for x_rows, g_rows, out, scale in zip(*(t.split(NORM_ROWS) for t in (x_RH, grad_RH, grad_x_RH, scale_R1))):
            normed, g = x_rows.float() * scale, g_rows.float()
            product = g * normed
            grad_weight += product.sum(0)
            # The mean of g · w · x̂ over the features is a matrix-vector product with w.
            mean = (product @ weight32).div_(x_RH.shape[-1]).unsqueeze(-1)
            out.copy_((g * weight32).addcmul_(normed, mean, value=-1).mul_(scale))
        return grad_x_RH.view_as(grad), grad_weight.to(weight.dtype), None


class RMSNorm(nn.Module):
    """Root-mean-square norm (https://arxiv.org/abs/1910.07467) with fp32 statistics, as Megatron builds norms."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        on = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=on))
        # With sequence parallelism each rank sees a part of the tokens: Megatron sums the gradients of what is marked.
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return _RMSNormFunction.apply(x, self.weight, self.eps)


class _SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty(gate.shape, dtype=gate.dtype)
        for g, u, o in zip(*(t.split(SWIGLU_ROWS) for t in (gate, up, out))):
            torch.ops.aten.silu.out(g, out=o)
            o.mul_(u)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad_gate_up = torch.empty_like(gate_up)
        rows = (t.split(SWIGLU_ROWS) for t in (*gate_up.chunk(2, dim=-1), *grad_gate_up.chunk(2, dim=-1), grad))
        for g, u, grad_g, grad_u, d in zip(*rows):
            torch.ops.aten.silu_backward.grad_input(d * u, g, grad_input=grad_g)
            torch.ops.aten.silu.out(g, out=grad_u)
            grad_u.mul_(d)
        return grad_gate_up


class SwiGLU(nn.Module):
    """silu(gate) · up of [T, 1, gate ‖ up] (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        return _SwiGLUFunction.apply(gate_up)
