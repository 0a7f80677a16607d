"""REINFORCE++: a return for each token, whitened over the whole step instead of within a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rlpost.algorithms.grpo import GRPO
from rlpost.losses.advantage import discounted_returns, group_advantages, token_rewards, whiten
from rlpost.losses.kl import kl

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.types import Sample

BASELINE = "reinforce_pp_baseline"


@dataclass
class ReinforcePP(GRPO):
    """REINFORCE++ (https://arxiv.org/abs/2501.03262).

    advantage: `reinforce_pp`, where each token earns −kl_coef·KL and the last live one the reward, and a token's
    advantage is its return, discounted by gamma; or `reinforce_pp_baseline`, where it is the reward minus its group's
    mean, minus kl_coef·KL of this token. Both whitened over all live tokens of the step.
    """

    name: ClassVar[str] = "reinforce_pp"
    advantage_names: ClassVar[tuple[str, ...]] = ("reinforce_pp", BASELINE)
    advantage: str | Callable[..., Any] = "reinforce_pp"
    kl_estimator: str = "k1"
    gamma: float = 1.0

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.check_choice("advantage", self.advantage_names)
        yield from self.check_number("gamma", 0, 1, above=True)

    @property
    def group_relative(self) -> bool:
        return self.advantage == BASELINE

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | ({"old_logprobs_always"} if self.kl_coef else set())

    def response_advantages(self, rewards_B: list[float], group_ids_B: list[int]) -> Tensor:
        if self.advantage == BASELINE:
            return group_advantages(rewards_B, group_ids_B, normalize_std=False)[0]
        return torch.tensor(rewards_B, dtype=torch.float32)

    def prepare(self, samples: Sequence[Sample]) -> dict[str, float]:
        metrics = super().prepare(samples)
        values = torch.cat([s.tokens["advantages"] for s in samples] or [torch.zeros(0)])
        self._flat = self.gamma == 1 and not bool((values != values[:1]).any())
        return metrics

    def has_signal(self, samples: Sequence[Sample]) -> bool:
        """Equal values whiten to 0 everywhere; a part of the step has a signal as soon as the whole has one."""
        live = any(any(mask) for mask in self.loss_masks(samples))
        return live and (not self._flat or bool(self.kl_coef or self.kl_loss_coef or self.entropy_coef))

    def finish(self, samples: Sequence[Sample], total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        values, masks = [], [sample.tokens["loss_mask"] for sample in samples]
        for sample, mask_R in zip(samples, masks):
            kl_R = None
            if self.kl_coef:
                kl_R = kl(sample.tokens["old_logprobs"], sample.tokens["reference_logprobs"], self.kl_estimator)
            reward = 0.0 if self.advantage == BASELINE else sample.reward
            earned_R = token_rewards(reward, mask_R, kl_R, self.kl_coef)
            if self.advantage == BASELINE:
                values.append(sample.tokens["advantages"] + earned_R)
            else:
                values.append(discounted_returns(earned_R, mask_R, self.gamma))
        for sample, white_R in zip(samples, whiten(values, masks, total)):
            sample.tokens["advantages"] = white_R
        return {}

    def minus_kl(self, advantages_N: Tensor, kl_N: Tensor) -> Tensor:
        return advantages_N  # it is in the returns already
