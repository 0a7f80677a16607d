"""Teachers whose weights are snapshots: where they begin, and how they follow the student."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlpost.teacher.config import TeacherConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlpost.weights.snapshots import SnapshotStore

TAG = "teacher"


class SnapshotTeacher:
    """What these teachers share; how to score is left to them.

    read_weights: a directory's weights as the snapshot store keeps them (`Policy.masters`). apart: sources whose
    teachers are no snapshots. Attributes: moves, how often the weights have changed.
    """

    def __init__(
        self,
        config: TeacherConfig,
        snapshots: SnapshotStore,
        read_weights: Callable[[str], Mapping[str, Tensor]],
        apart: Collection[str | None] = (),
    ):
        self.config, self.snapshots = config, snapshots
        self.batches = 0  # that moved the student
        self.moves = 0
        external = config.external()
        self.sources: list[str | None] = list(external) or [None]
        for source, directory in external.items():
            if source not in apart:
                snapshots.put(tag_of(source), read_weights(directory))
        if not external:
            snapshots.save(TAG)

    @property
    def own_tag(self) -> str | None:
        """The snapshot that began as the student, None for external teachers."""
        return None if self.config.external() else TAG

    def after_optimizer_step(self) -> None:
        if self.config.update == "ema" and self.config.every == "step":
            self._follow()

    def after_batch(self) -> None:
        self.batches += 1
        if self.config.update == "ema" and self.config.every == "batch":
            self._follow()
        elif self.config.update == "periodic" and self.batches % self.config.interval == 0:
            self.snapshots.save(TAG)
            self.moves += 1

    def _follow(self) -> None:
        self.snapshots.ema("student", TAG, self.config.alpha)
        self.moves += 1

    def start(self) -> None:
        """Snapshots are there."""

    def serve(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Snapshots hold nothing but memory."""

    def state_dict(self) -> dict[str, Any]:
        """Beside the snapshots, which the checkpoint holds in any case."""
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches = state["batches"]
        self.moves += 1


class SnapshotWeights:
    """A snapshot as `Publisher` reads the policy. gather: `MegatronPolicy.gather_masters`."""

    def __init__(
        self,
        gather: Callable[[dict[str, Tensor]], Iterator[tuple[str, Tensor]]],
        snapshots: SnapshotStore,
        tag: str = TAG,
    ):
        self.gather, self.snapshots, self.tag = gather, snapshots, tag

    def hf_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors under Hugging Face names, gathered in fp32 and cast one at a time. Collective."""
        for name, tensor in self.gather(self.snapshots.tensors(self.tag)):
            yield name, tensor if dtype is None else tensor.to(dtype)


def tag_of(source: str | None) -> str:
    """The snapshot of this source's teacher."""
    return TAG if source is None else f"{TAG}.{source}"
