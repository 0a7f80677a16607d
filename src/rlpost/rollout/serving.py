"""Keeps the engine on the policy's weights, whoever asks for samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlpost.assemble import Rooms

PUBLISHING = ("policy.weights", "engine.weights")  # what must be on the device
SAMPLING = (*PUBLISHING, "engine.kv_cache")


class Serving:
    """An engine never serves before its first commit, nor other weights than the trained policy's: neither older ones
    nor a teacher's. Every method is collective."""

    def __init__(self, rooms: Rooms):
        self.rooms = rooms
        self._steps: int | None = None  # done when the weights were published last

    def publish(self, steps: int) -> dict[str, float]:
        """The policy's weights after so many steps; starts the engine where it does not run, as a run that only trains
        on rows may never need one."""
        if not self.rooms.engine.started:
            self._start_engines()
        metrics = self.rooms.publisher.publish()
        self.rooms.canary.published()
        self._steps = steps
        return metrics

    def still_published(self, steps: int) -> bool:
        """The steps since did not move the weights: is what the engine serves the policy yet?"""
        if self._holds_policy():
            self._steps = steps
            return True
        return False

    def refresh(self, steps: int) -> None:
        """Publish where that is due."""
        if self._steps != steps or not self._holds_policy():
            self.rooms.machine.move(PUBLISHING)
            self.publish(steps)

    def ready(self, steps: int) -> None:
        """For sampling outside the phases."""
        self.refresh(steps)
        phases = {phase.name: phase.residents for phase in self.rooms.machine.phases}
        self.rooms.machine.move(phases.get("rollout", SAMPLING))
        self.rooms.canary.check()

    def weights_replaced(self) -> None:
        """What was published is not the policy any more."""
        self._steps = None

    def _start_engines(self) -> None:
        """One after the other, as an engine takes a share of the memory that is free: the teacher's sleeps again."""
        if self.rooms.teacher is not None:
            self.rooms.teacher.start()
            self.rooms.machine.move(PUBLISHING)
        self.rooms.engine.start()

    def _holds_policy(self) -> bool:
        """It did not sleep since, and no teacher has taken its turn."""
        return self.rooms.engine.serving and self.rooms.publisher.served is self.rooms.policy
