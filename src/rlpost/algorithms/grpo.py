"""GRPO and its relatives: an advantage per response, a policy-gradient loss per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rlpost.algorithms.base import live_field, own_function
from rlpost.algorithms.corrected import CorrectedAlgorithm, old_logprobs
from rlpost.losses import policy
from rlpost.losses.advantage import GROUP_ESTIMATORS, EmaBaseline, group_advantages
from rlpost.losses.kl import ESTIMATORS, kl
from rlpost.types import LossOutput

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.policy.logits import Head
    from rlpost.types import MicroBatch, Sample

POLICY_LOSSES = ("ppo_clip", "gspo", "cispo", "reinforce", "sapo")


@dataclass
class GRPO(CorrectedAlgorithm):
    """Defaults: GRPO (https://arxiv.org/abs/2402.03300) with token-mean reduction and no KL.

    advantage: grpo | rloo | reinforce, or your own `fn(rewards_B, group_ids_B) -> advantages_B`. policy_loss: ppo_clip
    | gspo | cispo | reinforce | sapo, or your own `fn(logp_N, old_N, advantages_N, micro) -> (loss_N, clipped_N)`; a
    function, or its import path. kl_coef puts the KL to the reference into the reward, kl_loss_coef into the loss; 0
    keeps no reference at all. reference_every: null, or the steps after which the reference becomes the current policy.
    """

    name: ClassVar[str] = "grpo"
    advantage_names: ClassVar[tuple[str, ...]] = (*GROUP_ESTIMATORS, "reinforce")
    advantage: str | Callable[..., Any] = "grpo"
    normalize_std: bool = True
    baseline_decay: float = 0.9  # of advantage=reinforce
    policy_loss: str | Callable[..., Any] = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float | None = None  # null: clip_low
    dual_clip: float | None = None
    tau_positive: float = 1.0  # of policy_loss=sapo
    tau_negative: float = 1.05
    kl_coef: float = 0.0
    kl_loss_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_unbiased: bool = False
    reference_every: int | None = None  # null: the initial policy for ever
    entropy_coef: float = 0.0
    baseline: EmaBaseline = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.baseline = EmaBaseline(self.baseline_decay)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.check_function("advantage", self.advantage_names)
        yield from self.check_function("policy_loss", POLICY_LOSSES)
        yield from self.check_choice("kl_estimator", ESTIMATORS)
        for flag in ("normalize_std", "kl_unbiased"):
            yield from self.check_flag(flag)
        yield from self.check_number("baseline_decay", 0, 1)
        yield from self.check_number("clip_low", 0, 1)
        yield from self.check_number("clip_high", optional=True)
        yield from self.check_number("dual_clip", 1, above=True, optional=True)
        for tau in ("tau_positive", "tau_negative"):
            yield from self.check_number(tau, above=True)
        yield from self.check_number("reference_every", 1, optional=True)
        coefficients = ("kl_coef", "kl_loss_coef", "entropy_coef")
        wrong = [line for name in coefficients for line in self.check_number(name)]
        yield from wrong
        if not wrong and self.kl_coef and self.kl_loss_coef:
            yield (
                f"algorithm.kl_coef={self.kl_coef} and algorithm.kl_loss_coef={self.kl_loss_coef} are not allowed "
                "together; the KL is either in the reward or in the loss, so one of them is 0"
            )
        if not wrong and self.kl_unbiased is True and not self.kl_loss_coef:
            yield (
                "algorithm.kl_unbiased=true corrects the gradient of the KL in the loss, but algorithm.kl_loss_coef=0: "
                "there is none"
            )
        if not wrong and self.reference_every is not None and not (self.kl_coef or self.kl_loss_coef):
            yield (
                f"algorithm.reference_every={self.reference_every} moves a reference that is not kept, as both "
                "algorithm.kl_coef and algorithm.kl_loss_coef are 0"
            )

    @property
    def needs(self) -> frozenset[str]:
        needs = {"rollout", "reward"}
        if self.policy_loss != "reinforce" or self.correction is not None or self.kl_coef or self.kl_unbiased:
            needs.add("old_logprobs")
        if self.kl_coef or self.kl_loss_coef:
            needs.add("reference_logprobs")
        return frozenset(needs)

    @property
    def group_relative(self) -> bool:
        return self.advantage in GROUP_ESTIMATORS

    def prepare(self, samples: Sequence[Sample]) -> dict[str, float]:
        super().prepare(samples)
        if not samples:
            return {}
        unscored = [s for s in samples if s.reward is None]
        if unscored:
            raise ValueError(f"{len(unscored)} of {len(samples)} samples have no reward, which {self.name} needs")
        rewards, groups = [s.reward for s in samples], [s.group_id for s in samples]
        flat = group_advantages(rewards, groups)[1]
        for sample, value in zip(samples, self.response_advantages(rewards, groups), strict=True):
            sample.tokens["advantages"] = value.expand(len(sample.response_ids)).clone()
        return {"grpo/zero_std_groups": float(flat), "grpo/zero_std_fraction": flat / max(len(set(groups)), 1)}

    def response_advantages(self, rewards_B: list[float], group_ids_B: list[int]) -> Tensor:
        """One advantage for each response [B], fp32."""
        if own := own_function(self.advantage):
            return torch.as_tensor(own(rewards_B, group_ids_B), dtype=torch.float32)
        if self.advantage == "reinforce":
            return self.baseline.advantages(rewards_B)
        return group_advantages(rewards_B, group_ids_B, self.advantage, normalize_std=self.normalize_std)[0]

    def has_signal(self, samples: Sequence[Sample]) -> bool:
        if self.kl_coef or self.kl_loss_coef or self.entropy_coef:
            return super().has_signal(samples)
        return any(any(s.loss_mask) and bool(s.tokens["advantages"].any()) for s in samples)

    def loss(self, head: Head, micro: MicroBatch) -> LossOutput:
        out = head.logprobs(micro.target_N, entropy=True)
        logp_N, old_N = out.logprobs_N, old_logprobs(micro, out.logprobs_N)
        metrics = {"policy/entropy": out.entropy_N.detach(), "policy/ppo_kl": (old_N - logp_N).detach()}
        advantages_N = live_field(micro, "advantages")
        if self.kl_coef:
            metrics["policy/kl"] = kl(old_N, live_field(micro, "reference_logprobs"), self.kl_estimator)
            advantages_N = self.minus_kl(advantages_N, metrics["policy/kl"])
        loss_N, metrics["policy/clip_fraction"] = self._policy_loss(micro, logp_N, old_N, advantages_N)
        factor_N, gap = self.correct(micro, logp_N, old_N)
        loss_N = loss_N * factor_N
        if self.kl_loss_coef:
            reference_N = live_field(micro, "reference_logprobs")
            kl_N = kl(logp_N, reference_N, self.kl_estimator, unbiased=self.kl_unbiased, old_N=old_N)
            loss_N = loss_N + self.kl_loss_coef * kl_N
            metrics["policy/kl"] = kl_N.detach()
        if self.entropy_coef:
            loss_N = loss_N - self.entropy_coef * out.entropy_N
        return LossOutput(loss_N.masked_fill(micro.fields["loss_mask"] <= 0, 0.0), metrics | gap)

    def minus_kl(self, advantages_N: Tensor, kl_N: Tensor) -> Tensor:
        """The KL in the reward, token by token."""
        return advantages_N - self.kl_coef * kl_N

    def _policy_loss(
        self, micro: MicroBatch, logp_N: Tensor, old_N: Tensor, advantages_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        if own := own_function(self.policy_loss):
            return own(logp_N, old_N, advantages_N, micro)
        clip: dict[str, Any] = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        if self.policy_loss == "reinforce":
            return policy.reinforce(logp_N, advantages_N)
        if self.policy_loss == "cispo":
            return policy.cispo(logp_N, old_N, advantages_N, **clip)
        if self.policy_loss == "sapo":
            tau = {"tau_positive": self.tau_positive, "tau_negative": self.tau_negative}
            return policy.sapo(logp_N, old_N, advantages_N, **tau)
        if self.policy_loss == "gspo":
            sequences = {"sequence_N": micro.sequence_N, "mask_N": micro.fields["loss_mask"]}
            return policy.gspo(logp_N, old_N, advantages_N, **sequences, **clip, dual_clip=self.dual_clip)
        return policy.ppo_clip(logp_N, old_N, advantages_N, **clip, dual_clip=self.dual_clip)

    def state_dict(self) -> dict[str, Any]:
        return {"baseline": self.baseline.value} if self.advantage == "reinforce" else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.baseline.value = state.get("baseline")
