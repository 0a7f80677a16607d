"""The critic's side of PPO: its clipped loss, and how much of the returns its values explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def value_loss(
    values_N: Tensor, old_N: Tensor, returns_N: Tensor, *, clip: float | None = 0.2
) -> tuple[Tensor, Tensor]:
    """(½·max((v − R)², (clip(v, old ± clip) − R)²), clipped_N): a value that has moved further than `clip` towards its
    return earns nothing more and has no gradient; clipped_N is 1 there (https://arxiv.org/abs/1707.06347 and its code).
    old_N: the values at the start of the rollout batch. clip=None: ½·(v − R)²."""
    plain_N = (values_N - returns_N).square()
    if clip is None:
        return plain_N / 2, torch.zeros_like(values_N)
    bounded_N = (values_N.clamp(old_N - clip, old_N + clip) - returns_N).square()
    return torch.maximum(plain_N, bounded_N) / 2, (bounded_N > plain_N).to(values_N.dtype)


def explained_variance(
    values: Sequence[Tensor],
    returns: Sequence[Tensor],
    masks: Sequence[Tensor],
    total: Callable[[Tensor], Tensor] = lambda x: x,
) -> float | None:
    """1 − Var(R − V)/Var(R) over the live tokens of all responses on all ranks: 1 is a perfect critic, 0 one that knows
    only the mean. None where all returns are equal. values, returns, masks: [R] for each response of this rank;
    total: the sum over ranks."""
    pairs = [torch.stack([R, R - V])[:, m > 0].double() for V, R, m in zip(values, returns, masks, strict=True)]
    both_2N = torch.cat([torch.zeros(2, 0, dtype=torch.float64), *pairs], dim=1)
    count = total(torch.tensor(both_2N.shape[1], dtype=torch.float64)).clamp_min(1.0)
    mean_2 = total(both_2N.sum(dim=1)) / count
    returns_, residuals = total((both_2N - mean_2[:, None]).square().sum(dim=1)).tolist()
    # Rounding alone leaves this much of equal returns.
    return None if returns_ <= 1e-12 * float(count) else 1 - residuals / returns_
