"""Teachers whose weights are here: the student's own, slowly moving, or those of other checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from rlpost.data.batching import write_back
from rlpost.policy.logits import Head, teacher_fields
from rlpost.teacher.config import TeacherConfig
from rlpost.teacher.weights import SnapshotTeacher, tag_of

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.data.batching import Batcher, Update
    from rlpost.policy.frozen import FrozenModel
    from rlpost.policy.protocol import Policy
    from rlpost.residents import Moved
    from rlpost.types import MicroBatch
    from rlpost.weights.snapshots import SnapshotStore


class LocalTeacher(SnapshotTeacher):
    """Scores with the trainer's own model, which holds the teacher's weights meanwhile, or with a model of the
    teacher's own where it has another shape.

    read_weights: see `SnapshotTeacher`. models: source (None: any) → the model of a teacher of another shape.
    Collective.
    """

    def __init__(
        self,
        config: TeacherConfig,
        policy: Policy,
        snapshots: SnapshotStore,
        batcher: Batcher,
        read_weights: Callable[[str], Mapping[str, Tensor]],
        models: Mapping[str | None, FrozenModel] = MappingProxyType({}),
    ):
        super().__init__(config, snapshots, read_weights, apart=models)
        self.policy, self.batcher, self.models = policy, batcher, models
        self.head: Tensor | None = None  # the teacher's output head [V / TP, H] as of the last score, on the last stage
        self.blank: dict[str, Tensor] = {}  # one row [1, …] of zeros for each field of `score`

    def residents(self) -> list[Moved]:
        return [model.residents["weights"] for model in self.models.values()]

    def score(self, update: Update) -> dict[str, float]:
        """Sets teacher_hidden, teacher_lse, … in `sample.tokens` of every sample that has a teacher prompt; `blank`
        stands for the others. No metrics. Collective."""
        heads, widths = [], []
        for source in self.sources:
            # Without the other teachers' samples: as many micro-batches, on every rank, some of them fillers.
            mine = [s for s in update.samples if source is None or s.prompt.source == source]
            micros = self.batcher.pack(replace(update, samples=mine), use="teacher")
            heads.append(self._score_by(source, micros))
            widths.append(self.blank["teacher_hidden"].shape[1])
        if len(heads) > 1:
            self._side_by_side(update, heads, widths)
        elif self.config.update == "trust_region":
            self._mix_with_student(update, heads[0])
        else:
            self.head = heads[0]
        return {}

    def _score_by(self, source: str | None, micros: list[MicroBatch]) -> Tensor | None:
        """This source's teacher on its micro-batches; its head."""
        if source in self.models:
            self._keep(micros, self.models[source].score(micros, teacher_fields))
            return self.models[source].head_weight()
        with self.snapshots.swap(tag_of(source)):
            results = self.policy.score(micros, teacher_fields)
            head = self._head()
        self._keep(micros, results)
        return head

    def _keep(self, micros: list[MicroBatch], results: list[dict[str, Tensor]]) -> None:
        self.blank = {name: torch.zeros_like(rows[:1]) for name, rows in results[0].items()}
        write_back(micros, results)

    def _head(self) -> Tensor | None:
        head = self.policy.head_weight()
        return None if head is None else head.detach().clone()

    def _side_by_side(self, update: Update, heads: list[Tensor | None], widths: list[int]) -> None:
        """Several teachers as one: each sample's hidden states stand in its teacher's columns of a head as wide as all
        heads together, zeros elsewhere, so that the logits are exactly that teacher's."""
        ends = dict(zip(self.sources, accumulate(widths)))
        self.head = None if heads[0] is None else torch.cat(heads, dim=1)
        self.blank["teacher_hidden"] = self.blank["teacher_hidden"].new_zeros(1, sum(widths))
        for sample in update.samples:
            if "teacher_hidden" in sample.tokens:
                hidden_RH, end = sample.tokens["teacher_hidden"], ends[sample.prompt.source]
                wide_RH = hidden_RH.new_zeros(len(hidden_RH), sum(widths))
                wide_RH[:, end - hidden_RH.shape[1] : end] = hidden_RH
                sample.tokens["teacher_hidden"] = wide_RH

    def _mix_with_student(self, update: Update, reference_head: Tensor | None) -> None:
        """(1 − r)·z_reference + r·z_student as one head: the two hidden states, scaled, on both heads side by side."""
        share = self.config.student_share
        student_head = self._head()
        self.head = None if student_head is None else torch.cat([reference_head, student_head], dim=1)

        def mixed(head: Head, micro: MicroBatch) -> dict[str, Tensor]:
            hidden_NH = torch.cat([(1 - share) * micro.fields["teacher_hidden"], share * head.hidden_NH], dim=1)
            return teacher_fields(head.beside(hidden_NH, self.head), micro)

        micros = self.batcher.pack(update, use="teacher", defaults=self.blank)
        self._keep(micros, self.policy.score(micros, mixed))
