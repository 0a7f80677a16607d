"""What the trainer asks of a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.data.batching import Update
    from rlpost.residents import Moved


class Teacher(Protocol):
    head: Tensor | None  # the output head [V / TP, H] beside `teacher_hidden`; None without hidden states
    blank: dict[str, Tensor]  # one row [1, …] for each field that `score` sets, of a sample that it did not score
    own_tag: str | None  # the snapshot that began as the student, None for other models

    def start(self) -> None:
        """An engine of its own, where it has one. Collective."""

    def serve(self) -> dict[str, float]:
        """Before the scoring of a step: be ready, also on an engine that others use meanwhile. Metrics of what was
        done. Collective."""
        ...

    def score(self, update: Update) -> dict[str, float]:
        """Sets teacher_logprobs [R], and what else it knows, in `sample.tokens` of every sample of this rank that has a
        teacher prompt. Returns counts over all ranks, which the steps of a batch add up. Collective."""
        ...

    def residents(self) -> list[Moved]:
        """The weights of models that are this teacher's alone."""
        ...

    def after_optimizer_step(self) -> None: ...

    def after_batch(self) -> None:
        """Some optimizer step of the rollout batch moved the student."""

    def close(self) -> None:
        """Give back what runs."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
