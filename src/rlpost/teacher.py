"""The teacher: slowly moving weights of the same network that score the student's responses under a richer prompt.

SDPO's self-teacher (spec: the EMA is fp32, seeded from and fed by the optimizer's fp32 masters). The `swap` backend
runs the trainer's own model with the teacher's weights for the length of the teach phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from rlpost.data.batching import write_back
from rlpost.policy.logits import teacher_fields

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.data.batching import Batcher, Update
    from rlpost.policy.protocol import Policy
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
        self.blank: dict[str, Tensor] = {}  # one row [1, …] of zeros for each field of `score`
        if TAG not in snapshots.tags():
            snapshots.save(TAG)

    def score(self, update: Update) -> None:
        """Sets teacher_hidden, teacher_lse, … in `sample.tokens` of every sample that has a teacher prompt; `blank`
        stands for the others. Collective."""
        micros = self.batcher.pack(update, use="teacher")
        with self.snapshots.swap(TAG):
            results = self.policy.score(micros, teacher_fields)
            self.head = self.policy.head_weight().detach().clone()
        self.blank = {name: torch.zeros_like(rows[:1]) for name, rows in results[0].items()}
        write_back(micros, results)

    def after_optimizer_step(self) -> None:
        if self.config.update == "ema" and self.config.every == "step":
            self.snapshots.ema("student", TAG, self.config.alpha)

    def after_batch(self) -> None:
        if self.config.update == "ema" and self.config.every == "batch":
            self.snapshots.ema("student", TAG, self.config.alpha)
