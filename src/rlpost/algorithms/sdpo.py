"""SDPO: the student moves toward a teacher that scored its own responses under a richer prompt.

The same loss serves plain on-policy distillation: only the teacher prompt and the teacher's weights differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from rlpost.algorithms.base import live_field
from rlpost.algorithms.corrected import CorrectedAlgorithm, old_logprobs
from rlpost.feedback import feedback_metrics
from rlpost.losses.distill import TAILS, close_tail, divergence, is_clip_weights, sampled_loss
from rlpost.policy.logits import HiddenTargets
from rlpost.types import LossOutput

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.policy.logits import Head, HeadOutput
    from rlpost.types import MicroBatch, Sample

MODES = ("full", "topk", "sampled")
TOP_K_IDS = ("student", "teacher", "union")


@dataclass
class SDPO(CorrectedAlgorithm):
    """Self-distillation policy optimisation (https://arxiv.org/abs/2601.20802).

    alpha: 0 KL(teacher‖student), 1 KL(student‖teacher), between Jensen-Shannon. mode: the `full` vocabulary, the
    `topk` ids of top_k_ids (with their tail as one bucket, or renormalised), or the `sampled` token alone (alpha 1).
    is_clip: null, or the ceiling of an importance weight against the weights that began the rollout batch.
    entropy_gate: null, or the teacher's entropy in nats above which KL(teacher‖student) is added: where the teacher is
    undecided the student stays so too (EOPD, https://arxiv.org/abs/2603.07079).
    """

    name: ClassVar[str] = "sdpo"
    alpha: float = 0.5
    mode: str = "topk"
    top_k: int = 100
    top_k_ids: str = "student"
    tail: str = "bucket"
    is_clip: float | None = None
    entropy_gate: float | None = None
    taught_scale: float = field(default=1.0, init=False, repr=False)  # live tokens per live token that is taught

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.check_choice("mode", MODES)
        yield from self.check_choice("top_k_ids", TOP_K_IDS)
        yield from self.check_choice("tail", TAILS)
        yield from self.check_number("alpha", 0, 1)
        yield from self.check_number("is_clip", above=True, optional=True)
        if self.mode == "sampled" and self.alpha != 1:
            yield (
                f"algorithm.alpha={self.alpha} is not allowed with algorithm.mode=sampled; the sampled token alone "
                "tells KL(student‖teacher), so algorithm.alpha=1"
            )
        wrong = list(self.check_number("entropy_gate", optional=True))
        yield from wrong
        if self.entropy_gate is not None and not wrong and (self.mode == "sampled" or self.alpha == 0):
            yield (
                f"algorithm.entropy_gate={self.entropy_gate} is not allowed with algorithm.mode={self.mode} and "
                f"algorithm.alpha={self.alpha}; it adds the forward KL of whole distributions (mode full or topk) to "
                "another divergence (alpha above 0)"
            )
        if not isinstance(self.top_k, int) or self.top_k < 1:
            yield f"algorithm.top_k={self.top_k} is not allowed; it is a whole number of at least 1"

    @property
    def needs(self) -> frozenset[str]:
        old = {"old_logprobs"} if self.is_clip is not None or self.correction is not None else set()
        distribution = set() if self.mode == "sampled" else {"teacher_distribution"}
        return frozenset({"rollout", "reward", "teacher"} | distribution | old)

    @property
    def top_k_needed(self) -> int:
        return self.top_k if self.mode == "topk" else 0

    @property
    def teacher_top_k(self) -> int:
        return self.top_k if self.mode == "topk" and not list(self.beyond_lists()) else 0

    def beyond_lists(self) -> Iterator[str]:
        if self.mode == "full":
            yield "algorithm.mode=full"
        if self.mode == "topk" and self.top_k_ids != "teacher":
            yield f"algorithm.top_k_ids={self.top_k_ids}"
        if self.entropy_gate is not None:
            yield f"algorithm.entropy_gate={self.entropy_gate}"

    def prepare(self, samples: Sequence[Sample]) -> dict[str, float]:
        super().prepare(samples)
        live = taught = 0
        for sample in samples:
            sample.tokens["distill_mask"] = torch.full((len(sample.response_ids),), float(sample.distill_mask))
            live += sum(sample.loss_mask)
            taught += sum(sample.loss_mask) if sample.distill_mask > 0 else 0
        self.taught_scale = live / taught if taught else 1.0
        return feedback_metrics(samples)

    def has_signal(self, samples: Sequence[Sample]) -> bool:
        return any(any(s.loss_mask) and s.distill_mask > 0 for s in samples)

    def loss(self, head: Head, micro: MicroBatch) -> LossOutput:
        targets = _hidden_targets(head, micro)
        overlap_N = None
        if self.mode == "topk":
            student_NK, teacher_NK, out, overlap_N = self._listed(head, micro, targets)
            student, teacher = close_tail(student_NK, self.tail), close_tail(teacher_NK, self.tail)
            value_N = divergence(student, teacher, self.alpha)
            if self.entropy_gate is not None:
                value_N = value_N + self._open(micro) * divergence(student, teacher, 0.0)
            kl_N = divergence(student.detach(), teacher, 0.0)
        else:
            out = head.logprobs(micro.target_N, entropy=True)
            if self.mode == "full":
                value_N, kl_N = head.divergence(_required(targets, "algorithm.mode=full"), self.alpha)
                if self.entropy_gate is not None:
                    value_N = value_N + self._open(micro) * head.divergence(targets, 0.0)[0]
            else:
                teacher_N = live_field(micro, "teacher_logprobs")
                value_N = sampled_loss(out.logprobs_N, teacher_N)
                kl_N = (out.logprobs_N - teacher_N).detach()  # its one-sample estimate, the other way round

        taught_N = live_field(micro, "distill_mask")
        old_N = old_logprobs(micro, out.logprobs_N)
        factor_N, metrics = self.correct(micro, out.logprobs_N, old_N)
        if self.is_clip is not None:
            factor_N = factor_N * is_clip_weights(out.logprobs_N, old_N, self.is_clip)
        loss_N = (value_N * factor_N * taught_N).masked_fill(taught_N == 0, 0.0)

        # The pool divides by all live tokens; these are means over those that have a teacher.
        mean_N = (taught_N > 0).to(kl_N.dtype) * self.taught_scale
        metrics["sdpo/distill_loss"] = value_N.detach() * mean_N
        metrics["sdpo/teacher_student_kl"] = kl_N * mean_N
        metrics["sdpo/student_entropy"] = out.entropy_N.detach()
        if "teacher_entropy" in micro.fields:
            metrics["sdpo/teacher_entropy"] = micro.fields["teacher_entropy"] * mean_N
        if overlap_N is not None:
            metrics["sdpo/topk_overlap"] = overlap_N * mean_N
        return LossOutput(loss_N, metrics)

    def _open(self, micro: MicroBatch) -> Tensor:
        """1 where the teacher's entropy is above the gate."""
        if "teacher_entropy" not in micro.fields:
            raise ValueError("algorithm.entropy_gate needs the teacher's entropy, so teacher.backend=swap")
        return (live_field(micro, "teacher_entropy") > self.entropy_gate).to(micro.fields["weights"].dtype)

    def _listed(
        self, head: Head, micro: MicroBatch, targets: HiddenTargets | None
    ) -> tuple[Tensor, Tensor, HeadOutput, Tensor | None]:
        """(student_NK, teacher_NK) log-probs at the same ids, the head's output, the share of the student's top-k
        that is in the teacher's. In a union an id that both chose is absent (−inf) the second time."""
        if self.top_k_ids == "student":
            out = head.logprobs(micro.target_N, top_k=self.top_k, entropy=True)
            teacher_NK = _required(targets, "algorithm.top_k_ids=student").logprobs_at(out.topk_ids_NK)
            return out.topk_logprobs_NK, teacher_NK, out, None
        if "teacher_topk_ids" in micro.fields:
            lists = (micro.fields[f"teacher_topk_{name}"] for name in ("ids", "logprobs"))
            ids_NK, teacher_NK = (rows[:, : self.top_k] for rows in lists)
        else:
            ids_NK, teacher_NK = _required(targets, f"algorithm.top_k_ids={self.top_k_ids}").topk(self.top_k)
        if self.top_k_ids == "teacher":
            out = head.logprobs(micro.target_N, extra_ids_NK=ids_NK, entropy=True)
            return out.extra_logprobs_NK, teacher_NK, out, None
        out = head.logprobs(micro.target_N, top_k=self.top_k, extra_ids_NK=ids_NK, entropy=True)
        twice_NK = (ids_NK[:, :, None] == out.topk_ids_NK[:, None, :]).any(dim=2)
        own_NK = _required(targets, "algorithm.top_k_ids=union").logprobs_at(out.topk_ids_NK)
        student_NK = torch.cat([out.topk_logprobs_NK, out.extra_logprobs_NK.masked_fill(twice_NK, -torch.inf)], dim=1)
        teacher_NK = torch.cat([own_NK, teacher_NK.masked_fill(twice_NK, -torch.inf)], dim=1)
        return student_NK, teacher_NK, out, twice_NK.float().mean(dim=1)


def _hidden_targets(head: Head, micro: MicroBatch) -> HiddenTargets | None:
    if "teacher_hidden" not in micro.fields or micro.teacher_head is None:
        return None
    return HiddenTargets(
        micro.fields["teacher_hidden"],
        micro.fields["teacher_lse"],
        micro.teacher_head,
        head.vocab_size,
        temperature=head.temperature,
        tp_group=head.tp_group,
    )


def _required(targets: HiddenTargets | None, key: str) -> HiddenTargets:
    if targets is None:
        raise ValueError(
            f"{key} needs the teacher's log-probs at ids of the student's choice, so teacher.backend=swap; the lists "
            "of an engine serve algorithm.mode=topk with algorithm.top_k_ids=teacher, and algorithm.mode=sampled"
        )
    return targets
