"""Policy-gradient losses per response token.

logp_N: log-probs of the sampled tokens under the weights being trained; old_N: the same at the start of the rollout
batch (detached); advantages_N. Every function returns (loss_N, clipped_N): clipped_N is 1 where the trust region
cut the token's gradient or ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def log_ratio(logp_N: Tensor, old_N: Tensor) -> Tensor:
    """log ρ = logp − old, clamped so that exp stays finite."""
    return (logp_N - old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_clip(
    logp_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (https://arxiv.org/abs/1707.06347); clip_high defaults to clip_low; with dual_clip
    c > 1 the loss of a negative advantage is at most −c·A (https://arxiv.org/abs/1912.09729)."""
    return _clipped_surrogate(log_ratio(logp_N, old_N).exp(), advantages_N, clip_low, clip_high, dual_clip)


def gspo(
    logp_N: Tensor,
    old_N: Tensor,
    advantages_N: Tensor,
    *,
    sequence_N: Tensor,
    mask_N: Tensor,
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """GSPO (https://arxiv.org/abs/2507.18071), its token form: the ratio is exp of the sequence's mean log-ratio over
    live tokens, and its gradient reaches each token through that token's own log-prob."""
    mean_N = sequence_mean((logp_N - old_N).detach(), sequence_N, mask_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = mean_N.exp() * torch.exp(logp_N - logp_N.detach())
    return _clipped_surrogate(ratio_N, advantages_N, clip_low, clip_high, dual_clip)


def cispo(
    logp_N: Tensor, old_N: Tensor, advantages_N: Tensor, *, clip_low: float = 0.2, clip_high: float | None = None
) -> tuple[Tensor, Tensor]:
    """CISPO (https://arxiv.org/abs/2506.13585): the ratio is clipped as a constant weight, no token loses its
    gradient."""
    ratio_N = log_ratio(logp_N, old_N).exp().detach()
    clipped_ratio_N = _clip(ratio_N, clip_low, clip_high)
    return -clipped_ratio_N * advantages_N * logp_N, (clipped_ratio_N != ratio_N).to(logp_N.dtype)


def reinforce(logp_N: Tensor, advantages_N: Tensor) -> tuple[Tensor, Tensor]:
    return -advantages_N * logp_N, torch.zeros_like(logp_N)


def sapo(
    logp_N: Tensor, old_N: Tensor, advantages_N: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> tuple[Tensor, Tensor]:
    """SAPO (https://arxiv.org/abs/2511.20347): a soft sigmoid gate in the place of the hard clip."""
    ratio_N = log_ratio(logp_N, old_N).exp()
    tau_N = torch.where(advantages_N >= 0, tau_positive, tau_negative)
    return -(4 / tau_N) * torch.sigmoid(tau_N * (ratio_N - 1)) * advantages_N, torch.zeros_like(logp_N)


def sequence_mean(x_N: Tensor, sequence_N: Tensor, mask_N: Tensor) -> Tensor:
    """Mean of x over the live tokens of each sequence, at each of its tokens [N]. What masked slots hold is never
    read. A sequence without a live token has mean 0."""
    sequences = int(sequence_N.max()) + 1 if sequence_N.numel() else 0
    live_N = mask_N > 0
    total_B = x_N.new_zeros(sequences).index_add_(0, sequence_N, x_N.masked_fill(~live_N, 0.0))
    count_B = x_N.new_zeros(sequences).index_add_(0, sequence_N, live_N.to(x_N.dtype))
    return (total_B / count_B.clamp_min(1.0))[sequence_N]


def _clip(ratio_N: Tensor, clip_low: float, clip_high: float | None) -> Tensor:
    return ratio_N.clamp(1 - clip_low, 1 + (clip_low if clip_high is None else clip_high))


def _clipped_surrogate(
    ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float | None, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    unclipped_N = -ratio_N * advantages_N
    bounded_N = -_clip(ratio_N, clip_low, clip_high) * advantages_N
    loss_N = torch.maximum(unclipped_N, bounded_N)
    clipped_N = bounded_N > unclipped_N
    if dual_clip is not None:
        ceiling_N = -dual_clip * advantages_N
        cut_N = (advantages_N < 0) & (ceiling_N < loss_N)
        loss_N = torch.where(cut_N, ceiling_N, loss_N)
        clipped_N = clipped_N | cut_N
    return loss_N, clipped_N.to(ratio_N.dtype)
