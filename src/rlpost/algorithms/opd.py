"""On-policy distillation: as a loss against the teacher's distribution, or as an advantage from its log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlpost.algorithms.base import live_field
from rlpost.algorithms.corrected import old_logprobs
from rlpost.algorithms.sdpo import SDPO
from rlpost.losses.policy import ppo_clip
from rlpost.types import LossOutput

if TYPE_CHECKING:
    from rlpost.policy.logits import Head
    from rlpost.types import MicroBatch


@dataclass
class OPD(SDPO):
    """On-policy distillation (https://arxiv.org/abs/2306.13649); the teacher is another, stronger model.

    Exactly one of the two coefficients is above 0. loss_coef: times SDPO's divergence, here the reverse KL.
    advantage_coef: the sampled token's advantage −advantage_coef·(S(y) − Q(y)) in PPO's clipped loss, for which the
    teacher's log-probs of the sampled tokens are enough.
    """

    name: ClassVar[str] = "opd"
    alpha: float = 1.0
    loss_coef: float = 1.0
    advantage_coef: float = 0.0
    clip_low: float = 0.2
    clip_high: float | None = None  # null: clip_low

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.check_number("clip_low", 0, 1)
        yield from self.check_number("clip_high", optional=True)
        wrong = [line for name in ("loss_coef", "advantage_coef") for line in self.check_number(name)]
        yield from wrong
        if not wrong and (self.loss_coef > 0) == (self.advantage_coef > 0):
            yield (
                f"algorithm.loss_coef={self.loss_coef} and algorithm.advantage_coef={self.advantage_coef} are not "
                "allowed together; distillation is either a loss or an advantage, so exactly one is above 0"
            )

    @property
    def needs(self) -> frozenset[str]:
        if self.advantage_coef:
            return (super().needs - {"reward", "teacher_distribution"}) | {"old_logprobs"}
        return super().needs - {"reward"}

    @property
    def top_k_needed(self) -> int:
        return 0 if self.advantage_coef else super().top_k_needed

    @property
    def teacher_top_k(self) -> int:
        return 0 if self.advantage_coef else super().teacher_top_k

    def beyond_lists(self) -> Iterator[str]:
        if not self.advantage_coef:
            yield from super().beyond_lists()

    def loss(self, head: Head, micro: MicroBatch) -> LossOutput:
        if self.advantage_coef:
            return self._advantage_loss(head, micro)
        output = super().loss(head, micro)
        return LossOutput(self.loss_coef * output.loss_N, output.metrics)

    def _advantage_loss(self, head: Head, micro: MicroBatch) -> LossOutput:
        out = head.logprobs(micro.target_N, entropy=True)
        taught_N, old_N = live_field(micro, "distill_mask"), old_logprobs(micro, out.logprobs_N)
        gap_N = (old_N - live_field(micro, "teacher_logprobs")).detach().masked_fill(taught_N == 0, 0.0)
        clip = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        loss_N, clipped_N = ppo_clip(out.logprobs_N, old_N, -self.advantage_coef * gap_N * taught_N, **clip)
        factor_N, metrics = self.correct(micro, out.logprobs_N, old_N)
        metrics["sdpo/teacher_student_kl"] = gap_N * self.taught_scale
        metrics["sdpo/student_entropy"] = out.entropy_N.detach()
        metrics["policy/clip_fraction"] = clipped_N
        return LossOutput((loss_N * factor_N).masked_fill(taught_N == 0, 0.0), metrics)
