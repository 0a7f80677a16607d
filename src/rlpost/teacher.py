"""The teacher: slowly moving weights of the same network that score the student's responses under a richer prompt.

SDPO's self-teacher (spec: the EMA is fp32, seeded from and fed by the optimizer's fp32 masters). The `swap` backend
runs the trainer's own model with the teacher's weights for the length of the teach phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from rlpost.data.batching import write_back
from rlpost.policy.logits import teacher_fields

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.data.batching import Batcher, Update
    from rlpost.policy.protocol import Policy
    from rlpost.types import Sample
    from rlpost.weights.snapshots import SnapshotStore

TAG = "teacher"


@dataclass
class TeacherConfig:
    """update: static (the initial policy) or ema. alpha: the student's share in one EMA update, 0 < alpha ≤ 1.
    every: update after each optimizer `step` or once per rollout `batch`. backend: swap."""

    update: str = "ema"
    alpha: float = 0.01
    every: str = "step"
    backend: str = "swap"

    def __post_init__(self) -> None:
        mistakes = [
            f"teacher.{name}={getattr(self, name)} is not allowed; allowed are {', '.join(allowed)}"
            for name, allowed in (("update", ("static", "ema")), ("every", ("step", "batch")), ("backend", ("swap",)))
            if getattr(self, name) not in allowed
        ]
        if not 0 < self.alpha <= 1:
            mistakes.append(f"teacher.alpha={self.alpha} is not allowed; it is the student's share, 0 < alpha ≤ 1")
        if mistakes:
            raise ValueError("\n".join(mistakes))


def build_teacher_config(values: Mapping[str, Any]) -> TeacherConfig:
    known = [f.name for f in fields(TeacherConfig)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"teacher has no field {', '.join(map(repr, unknown))}. There are: {', '.join(known)}")
    return TeacherConfig(**values)


class SwapTeacher:
    """Scores with the trainer's own model, holding the teacher's weights meanwhile."""

    def __init__(
        self,
        config: TeacherConfig,
        policy: Policy,
        snapshots: SnapshotStore,
        batcher: Batcher,
    ):
        self.config, self.policy, self.snapshots = config, policy, snapshots
        self.batcher = batcher
        self.head: Tensor | None = None  # the teacher's output head [V / TP, H], as of the last score
        if TAG not in snapshots.tags():
            snapshots.save(TAG)

    def score(self, update: Update) -> None:
        """Sets teacher_hidden, teacher_lse, … in `sample.tokens` of every sample; zeros where the teacher has nothing
        to say (distill_mask 0). Collective."""
        micros = self.batcher.pack(update, use="teacher")
        with self.snapshots.swap(TAG):
            results = self.policy.score(micros, teacher_fields)
            self.head = self.policy.head_weight().detach().clone()
        write_back(micros, results)
        fill_untaught(update.samples)

    def after_optimizer_step(self) -> None:
        if self.config.update == "ema" and self.config.every == "step":
            self.snapshots.ema("student", TAG, self.config.alpha)

    def after_batch(self) -> None:
        if self.config.update == "ema" and self.config.every == "batch":
            self.snapshots.ema("student", TAG, self.config.alpha)


def fill_untaught(samples: Sequence[Sample]) -> None:
    """Every sample of a micro-batch has the same fields: zeros stand for "not scored", the mask for "not taught"."""
    scored = next((s for s in samples if "teacher_hidden" in s.tokens), None)
    for sample in samples:
        count = len(sample.response_ids)
        sample.tokens["distill_mask"] = torch.full((count,), float(sample.distill_mask))
        for name in () if scored is None else [n for n in scored.tokens if n.startswith("teacher_")]:
            if name not in sample.tokens:
                like = scored.tokens[name]
                sample.tokens[name] = like.new_zeros((count, *like.shape[1:]))
