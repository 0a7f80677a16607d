"""PPO with a critic: a value for the state before each token, and generalised advantage estimates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rlpost.algorithms.base import live_field
from rlpost.algorithms.grpo import GRPO
from rlpost.losses.advantage import discounted_returns, gae, token_rewards, whiten
from rlpost.losses.kl import kl
from rlpost.losses.value import explained_variance, value_loss
from rlpost.types import LossOutput

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.types import MicroBatch, Sample


@dataclass
class PPO(GRPO):
    """PPO (https://arxiv.org/abs/1707.06347) with GAE (https://arxiv.org/abs/1506.02438).

    Each token earns −kl_coef·KL and the last live one the reward; gamma discounts, gae_lambda trusts the returns (1) or
    the critic (0). whiten: advantages over all live tokens of the step. value_clip: how far a value may move from that
    of the rollout batch's start before its loss is flat; null: as far as it likes. The critic's own model and optimizer
    are the group `critic`.
    """

    name: ClassVar[str] = "ppo"
    advantage_names: ClassVar[tuple[str, ...]] = ("gae",)
    advantage: str | Callable[..., Any] = "gae"
    kl_estimator: str = "k1"
    gamma: float = 1.0
    gae_lambda: float = 0.95
    whiten: bool = True
    value_clip: float | None = 0.2

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.check_choice("advantage", self.advantage_names)
        yield from self.check_number("gamma", 0, 1, above=True)
        yield from self.check_number("gae_lambda", 0, 1)
        yield from self.check_flag("whiten")
        yield from self.check_number("value_clip", above=True, optional=True)

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"values"} | ({"old_logprobs_always"} if self.kl_coef else set())

    def response_advantages(self, rewards_B: list[float], group_ids_B: list[int]) -> Tensor:
        return torch.tensor(rewards_B, dtype=torch.float32)  # `finish`, which knows the values, replaces them

    def has_signal(self, samples: Sequence[Sample]) -> bool:
        """Equal rewards teach too: the critic what they are, the policy where it is better than that."""
        return any(any(mask) for mask in self.loss_masks(samples))

    def finish(self, samples: Sequence[Sample], total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        masks, values = ([s.tokens[name] for s in samples] for name in ("loss_mask", "values"))
        advantages, observed = [], []
        for sample, mask_R, values_R in zip(samples, masks, values):
            kl_R = None
            if self.kl_coef:
                kl_R = kl(sample.tokens["old_logprobs"], sample.tokens["reference_logprobs"], self.kl_estimator)
            earned_R = token_rewards(sample.reward, mask_R, kl_R, self.kl_coef)
            advantages.append(gae(earned_R, values_R, mask_R, self.gamma, self.gae_lambda))
            observed.append(discounted_returns(earned_R, mask_R, self.gamma))
            sample.tokens["returns"] = advantages[-1] + values_R
        if self.whiten:
            advantages = whiten(advantages, masks, total)
        for sample, advantages_R in zip(samples, advantages):
            sample.tokens["advantages"] = advantages_R
        # Of what was earned, not of the λ-returns, which hold the values themselves.
        explained = explained_variance(values, observed, masks, total)
        return {} if explained is None else {"critic/explained_variance": explained}

    def minus_kl(self, advantages_N: Tensor, kl_N: Tensor) -> Tensor:
        return advantages_N  # it is in what the tokens earn already

    def value_loss(self, values_N: Tensor, micro: MicroBatch) -> LossOutput:
        old_N, returns_N = live_field(micro, "values"), live_field(micro, "returns")
        loss_N, clipped_N = value_loss(values_N, old_N, returns_N, clip=self.value_clip)
        loss_N = loss_N.masked_fill(micro.fields["loss_mask"] <= 0, 0.0)
        return LossOutput(loss_N, {"critic/value": values_N.detach(), "critic/clip_fraction": clipped_N.detach()})
