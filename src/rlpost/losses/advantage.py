"""Advantages of whole responses, relative to their group (by explicit id) or to a running baseline, and per-token
returns, whitened over the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_ESTIMATORS = ("grpo", "rloo")


def group_advantages(
    rewards_B: Sequence[float], group_ids_B: Sequence[int], estimator: str = "grpo", *, normalize_std: bool = True
) -> tuple[Tensor, int]:
    """(advantages_B in fp32, number of groups whose rewards are all equal: they teach nothing).

    grpo: r − mean, over std + 1e-6 (unbiased) unless normalize_std is off (https://arxiv.org/abs/2402.03300,
    https://arxiv.org/abs/2503.20783); rloo: G/(G−1)·(r − mean) (https://arxiv.org/abs/2402.14740). Groups may be
    uneven and interleaved; a group of one has advantage 0.
    """
    if estimator not in GROUP_ESTIMATORS:
        raise ValueError(f"estimator={estimator!r}: must be one of {', '.join(GROUP_ESTIMATORS)}")
    members: dict[int, list[int]] = {}
    for position, group in enumerate(group_ids_B):
        members.setdefault(group, []).append(position)
    rewards = torch.as_tensor(rewards_B, dtype=torch.float64)
    advantages = torch.zeros_like(rewards)
    zero_std_groups = 0
    for positions in members.values():
        r = rewards[positions]
        if r.max() == r.min():
            zero_std_groups += 1
            continue
        centred = r - r.mean()
        if estimator == "rloo":
            advantages[positions] = centred * len(r) / (len(r) - 1)
        else:
            advantages[positions] = centred / (r.std() + 1e-6) if normalize_std else centred
    return advantages.float(), zero_std_groups


@dataclass
class EmaBaseline:
    """REINFORCE's running baseline: advantages are taken against its value *before* this step's rewards."""

    decay: float = 0.9
    value: float | None = None  # None: before the first step, whose own mean reward it takes

    def advantages(self, rewards_B: Sequence[float]) -> Tensor:
        rewards = torch.as_tensor(rewards_B, dtype=torch.float64)
        mean = float(rewards.mean())
        if self.value is None:
            self.value = mean
        advantages = rewards - self.value
        self.value = self.decay * self.value + (1 - self.decay) * mean
        return advantages.float()


def last_live(mask_R: Tensor) -> int | None:
    """Where the reward of a response stands: its last token with mask > 0."""
    live = mask_R.nonzero()
    return int(live[-1]) if len(live) else None


def discounted_returns(rewards_R: Tensor, mask_R: Tensor, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + gamma·G of the next live token [R]; tokens with mask 0 are skipped, not steps of their own, and have
    return 0."""
    returns_R = torch.zeros_like(rewards_R)
    following = 0.0
    for t in reversed(mask_R.nonzero().flatten().tolist()):
        following = float(rewards_R[t]) + gamma * following
        returns_R[t] = following
    return returns_R


def token_rewards(reward: float, mask_R: Tensor, kl_R: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """What each token earns [R]: −kl_coef·kl where it is live, and the reward on the last live one."""
    earned_R = torch.zeros(len(mask_R))
    if kl_R is not None:
        earned_R -= kl_coef * kl_R.masked_fill(mask_R <= 0, 0.0)
    if (last := last_live(mask_R)) is not None:
        earned_R[last] += reward
    return earned_R


def gae(rewards_R: Tensor, values_R: Tensor, mask_R: Tensor, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """Generalised advantage estimates A_t = δ_t + γλ·A_next with δ_t = r_t + γ·V_next − V_t [R]
    (https://arxiv.org/abs/1506.02438). `next` is the next live token: those with mask 0 are skipped, not steps of their
    own, and have advantage 0. Nothing follows the last one."""
    advantages_R = torch.zeros_like(values_R)
    rewards, values = rewards_R.tolist(), values_R.tolist()
    advantage = following = 0.0
    for t in reversed(mask_R.nonzero().flatten().tolist()):
        advantage = rewards[t] + gamma * following - values[t] + gamma * lam * advantage
        advantages_R[t], following = advantage, values[t]
    return advantages_R


def whiten(
    values: Sequence[Tensor], masks: Sequence[Tensor], total: Callable[[Tensor], Tensor] = lambda x: x
) -> list[Tensor]:
    """(x − mean)/√(variance + 1e-8) over the live tokens of all responses on all ranks, 0 elsewhere; the variance has
    Bessel's correction. values, masks: [R] for each response of this rank. total: the sum over ranks."""
    live = torch.cat([v[m > 0].double() for v, m in zip(values, masks, strict=True)] or [torch.zeros(0).double()])
    count, added = total(torch.stack([torch.tensor(len(live), dtype=torch.float64), live.sum()])).tolist()
    mean = added / max(count, 1.0)
    variance = float(total((live - mean).square().sum())) / max(count - 1.0, 1.0)
    scale = (variance + 1e-8) ** -0.5
    return [((v.double() - mean) * scale).masked_fill(m <= 0, 0.0).to(v.dtype) for v, m in zip(values, masks)]
