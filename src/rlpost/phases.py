"""The state machine: which phase runs when, what is on the device meanwhile, and how ranks agree after each.

Phases come from the configuration (`conf/phases/*.yaml`). After every phase all ranks meet in one small all-reduce;
where one rank failed, every rank raises the same `PhaseError`, and nobody waits in a collective that the failed rank
will never join.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rlpost.config.compose import ConfigError
from rlpost.config.schema import PhaseConfig

log = logging.getLogger(__name__)

ERROR_KEY = "rlpost/error"
GRACE_SECONDS = 4.0  # for a rank to meet the others' failure by itself, before its watcher ends it


class PhaseError(RuntimeError):
    """One rank's failure, raised on every rank."""

    def __init__(self, rank: int, phase: str, step: int, message: str):
        self.rank, self.phase, self.step, self.message = rank, phase, step, message
        super().__init__(f"rank {rank} failed in phase {phase!r} of step {step}: {message}")


class Agreement:
    """How ranks learn of each other's failures and stop requests. World size 1 needs no process group."""

    def __init__(self) -> None:
        self.distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.distributed else 0
        self.stop_requested = False
        self._raised = threading.Event()
        if self.distributed:
            # A group and a store connection of its own: neither may be used by a collective that hangs.
            self._group = dist.new_group(backend="gloo")
            self._store = dist.distributed_c10d._get_default_store()
            self._watch_store = self._store.clone()
            threading.Thread(target=self._watch, name="rlpost-watcher", daemon=True).start()

    def post_failure(self, phase: str, step: int, error: BaseException) -> PhaseError:
        """Tell the others; the first failure wins."""
        message = str(error) or type(error).__name__
        if not isinstance(error, (ValueError, OSError, RuntimeError)):
            message = f"{type(error).__name__}: {message}"
        fields = [str(self.rank), phase, str(step), message]
        if self.distributed:
            fields = self._store.compare_set(ERROR_KEY, "", "\x1f".join(fields)).decode().split("\x1f", 3)
        self._raised.set()
        return _parsed(fields)

    @contextmanager
    def guard(self, what: str, step: int) -> Iterator[None]:
        """Work outside the phases (building, evaluating, saving): a failure in it is every rank's too."""
        try:
            yield
        except (PhaseError, ConfigError):
            raise  # every rank's already
        except Exception as error:
            raise self.post_failure(what, step, error) from error

    def posted(self, store: Any = None) -> PhaseError | None:
        store = store or self._store
        if not store.check([ERROR_KEY]):
            return None
        return _parsed(store.get(ERROR_KEY).decode().split("\x1f", 3))

    def meet(self, phase_number: int, values: Sequence[float] = ()) -> tuple[bool, list[float]]:
        """All ranks are through the phase: (did anybody ask to stop, the maxima of `values` over ranks)."""
        if not self.distributed:
            return self.stop_requested, list(values)
        flags = torch.tensor([float(self.stop_requested), phase_number, -phase_number, *values], dtype=torch.float64)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        pause = 1e-4
        while not work.is_completed():
            if pause > 0.01 and (error := self.posted()):
                self._raised.set()
                raise error
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        work.wait()
        if flags[1] != -flags[2]:
            raise RuntimeError(
                f"ranks are in different phases ({int(-flags[2])} and {int(flags[1])}): their configurations differ"
            )
        return bool(flags[0]), flags[3:].tolist()

    def _watch(self) -> None:
        """Ends this rank where it hangs in a collective that a failed rank has left."""
        while not self._raised.is_set():
            time.sleep(0.5)
            try:
                error = self.posted(self._watch_store)
            except dist.DistError:
                return  # the store is gone: the launcher is ending this rank
            if error is None or error.rank == self.rank:
                continue
            if not self._raised.wait(GRACE_SECONDS):
                log.error("ended by another rank's failure: %s", error)
                logging.shutdown()
                sys.stdout.flush()
                os._exit(1)


def _parsed(fields: Sequence[str]) -> PhaseError:
    rank, phase, step, message = fields
    return PhaseError(int(rank), phase, int(step), message)


class Resident(Protocol):
    """Something that can be on the device or off it."""

    def bytes(self) -> int: ...

    def onload(self) -> None: ...

    def offload(self) -> None: ...


@dataclass
class Bookkept:
    """A resident where there is no device to move to: only its size is known."""

    size: Callable[[], int]

    def bytes(self) -> int:
        return self.size()

    def onload(self) -> None:
        """Nothing moves on the CPU."""

    def offload(self) -> None:
        """Nothing moves on the CPU."""


@dataclass
class PhaseReport:
    """What one phase cost. Bytes are of the device (of the process, on the CPU)."""

    name: str
    step: int
    start: float  # seconds since the epoch
    seconds: float
    moved_bytes: int
    resident_bytes: int
    peak_bytes: int


class PhaseMachine:
    """Runs the phases of a step in their configured order, moving exactly the difference of residents between two."""

    def __init__(
        self,
        phases: Sequence[PhaseConfig],
        handlers: Mapping[str, Callable[[Any], None]],
        residents: Mapping[str, Resident],
        agreement: Agreement,
        on_report: Callable[[PhaseReport], None] = lambda report: None,
    ):
        self.phases, self.handlers, self.residents = list(phases), handlers, residents
        self.agreement, self.on_report = agreement, on_report
        self.on_device: set[str] = set()

    def run(self, number: int, step: int, work: Any) -> bool:
        """Phase `number` of the plan; true where a rank was asked to stop. Raises PhaseError on all ranks alike."""
        phase = self.phases[number]
        start, clock = time.time(), time.perf_counter()
        moved = 0
        for attempt in range(phase.retries + 1):
            failed = False
            try:
                moved += self._move(set(phase.residents))
                self.handlers[phase.name](work)
            except PhaseError:
                raise
            except Exception as error:
                if attempt == phase.retries:
                    raise self.agreement.post_failure(phase.name, step, error) from error
                log.exception("phase %s of step %d failed, attempt %d", phase.name, step, attempt + 1)
                failed = True
            seconds = time.perf_counter() - clock
            stop, (slowest, any_failed) = self.agreement.meet(number, [seconds, float(failed)])
            if not any_failed:
                break
        resident = sum(self.residents[name].bytes() for name in phase.residents)
        self.on_report(PhaseReport(phase.name, step, start, slowest, moved, resident, peak_bytes()))
        return stop

    def _move(self, wanted: set[str]) -> int:
        moved = 0
        for name in sorted(self.on_device - wanted):
            moved += self.residents[name].bytes()
            self.residents[name].offload()
        for name in sorted(wanted - self.on_device):
            moved += self.residents[name].bytes()
            self.residents[name].onload()
        self.on_device = wanted
        return moved


def peak_bytes() -> int:
    """The highest memory so far: of the device, or of this process on the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
