"""The state machine: which phase runs when, what is on the device meanwhile, and how ranks agree after each.

Phases come from the configuration (`conf/phases/*.yaml`). After every phase all ranks meet in one small all-reduce;
where one rank failed, every rank raises the same `PhaseError`, and nobody waits in a collective that the failed rank
will never join: what the main thread cannot notice, its watch-dog does (watch.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlpost.config.compose import ConfigError
from rlpost.config.schema import PhaseConfig
from rlpost.failures import PhaseError, device_bytes, is_communication, peak_bytes, reset_peak, sentence
from rlpost.parallel import gloo_group
from rlpost.residents import Resident
from rlpost.watch import Watch

log = logging.getLogger(__name__)

CAUSE_S = 1.5  # for the reason of a broken connection to become known
LIMIT = "trainer.phase_timeout_s"


class Agreement:
    """How ranks learn of each other's failures and stop requests.

    directory: the run's, for the stacks of a hang. limit_s: of each piece of work (0: none); see `watch.py`.
    """

    _numbers = count()  # several runs of one job do not read each other's failures

    def __init__(self, directory: Path | None = None, limit_s: float = 0.0) -> None:
        self.distributed = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self.distributed else 0
        self.limit_s = limit_s
        self.stop_requested = False
        store: dist.Store = dist.HashStore()
        if self.distributed:
            # A group and a store connection of its own: neither may be used by a collective that hangs.
            self._group = gloo_group()
            store = dist.distributed_c10d._get_default_store().clone()
        self.watch = Watch(self.rank, dist.PrefixStore(f"rlpost/{next(self._numbers)}", store), directory)

    def post_failure(
        self, phase: str, step: int, error: BaseException, held: Mapping[str, int] | None = None
    ) -> PhaseError:
        """Tell the others; the first failure wins. held: bytes in memory by name, for a lack of it."""
        mine = PhaseError(self.rank, phase, step, sentence(error, phase, held or {}))
        if not self.distributed:
            return mine  # a notebook may go on
        cause = self._cause(phase, step) if is_communication(error) else None
        if cause is None:
            cause = self.watch.post(mine)
        self.watch.raised.set()
        return cause

    def _cause(self, phase: str, step: int) -> PhaseError | None:
        """Why a connection broke: another rank failed or died."""
        until = time.monotonic() + CAUSE_S
        while (found := self.watch.posted() or self.watch.post_lost(phase, step)) is None:
            if time.monotonic() > until:
                return None
            time.sleep(0.02)
        return found

    @contextmanager
    def guard(
        self,
        what: str,
        step: int,
        *,
        limit_s: float | None = None,
        field: str = LIMIT,
        held: Callable[[], Mapping[str, int]] = dict,
    ) -> Iterator[None]:
        """Work whose failure on this rank is every rank's, and whose time is limited."""
        with self.watch.during(what, step, self.limit_s if limit_s is None else limit_s, field):
            try:
                yield
            except (PhaseError, ConfigError):
                raise  # every rank's already
            except Exception as error:
                if _interrupted(error):
                    raise KeyboardInterrupt from error
                raise self.post_failure(what, step, error, held()) from error

    def meet(self, phase_number: int, values: Sequence[float] = ()) -> tuple[bool, list[float]]:
        """All ranks are through the phase: (did anybody ask to stop, the maxima of `values` over ranks)."""
        if not self.distributed:
            return self.stop_requested, list(values)
        flags = torch.tensor([float(self.stop_requested), phase_number, -phase_number, *values], dtype=torch.float64)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        pause = 1e-4
        while not work.is_completed():
            if pause > 0.01 and (error := self.watch.posted()):
                self.watch.raised.set()
                raise error
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        work.wait()
        if error := self.watch.ended():
            self.watch.raised.set()
            raise error
        if flags[1] != -flags[2]:
            raise RuntimeError(
                f"ranks are in different phases ({int(-flags[2])} and {int(flags[1])}): their configurations differ"
            )
        return bool(flags[0]), flags[3:].tolist()

    def close(self) -> None:
        self.watch.close()


def _interrupted(error: BaseException) -> bool:
    """A signal's exception may come anywhere, and a library's clean-up stumble over it with an error of its own."""
    cause = error.__context__
    return cause is not None and (isinstance(cause, KeyboardInterrupt) or _interrupted(cause))


@dataclass
class PhaseReport:
    """What one phase cost. Bytes are of the device (of the process, on the CPU)."""

    name: str
    step: int
    start: float  # seconds since the epoch
    seconds: float
    moved_bytes: int  # copied to the device or from it
    resident_bytes: int
    peak_bytes: int  # of this process during the phase
    device_bytes: int  # in use on the device as it ends, by all processes; 0 on the CPU


class PhaseMachine:
    """Runs the phases of a step in their configured order, moving exactly the difference of residents between two."""

    def __init__(
        self,
        phases: Sequence[PhaseConfig],
        handlers: Mapping[str, Callable[[Any], None]],
        residents: Mapping[str, Resident],
        agreement: Agreement,
        on_begin: Callable[[str], None] = lambda name: None,
        on_report: Callable[[PhaseReport], None] = lambda report: None,
    ):
        self.phases, self.handlers, self.residents = list(phases), handlers, residents
        self.agreement, self.on_begin, self.on_report = agreement, on_begin, on_report

    def run(self, number: int, step: int, work: Any) -> bool:
        """Phase `number` of the plan; true where a rank was asked to stop. Raises PhaseError on all ranks alike."""
        phase = self.phases[number]
        limit = {} if phase.timeout_s is None else {"limit_s": phase.timeout_s, "field": "the phase's timeout_s"}
        start, clock, moved = time.time(), time.perf_counter(), 0
        reset_peak()
        self.on_begin(phase.name)
        for attempt in range(phase.retries + 1):
            with self.agreement.guard(phase.name, step, held=lambda: self._held(phase), **limit):
                failed = False
                try:
                    moved += self.move(phase.residents)
                    self.handlers[phase.name](work)
                except Exception:
                    if attempt == phase.retries:
                        raise
                    # Not passed over: all ranks learn of it in `meet`, and try again together.
                    log.exception("phase %s of step %d failed, attempt %d", phase.name, step, attempt + 1)
                    failed = True
                seconds = time.perf_counter() - clock
                stop, (slowest, any_failed) = self.agreement.meet(number, [seconds, float(failed)])
                if not any_failed:
                    break
        with self.agreement.guard(phase.name, step):
            resident = sum(self._held(phase).values())
            report = PhaseReport(phase.name, step, start, slowest, moved, resident, peak_bytes(), device_bytes())
            self.on_report(report)
        return stop

    def move(self, wanted: Sequence[str]) -> int:
        """Put these on the device, in their order, after everything else has left it. Returns the bytes copied."""
        copied = sum(self.residents[name].offload() for name in self.on_device() if name not in wanted)
        return copied + sum(self.residents[name].onload() for name in wanted if not self.residents[name].on_device)

    def bring(self, *names: str) -> None:
        """For work outside the phases: put these beside what is there; only KV caches give way."""
        self.move([name for name in self.on_device() if not name.endswith("kv_cache")] + list(names))

    def on_device(self) -> list[str]:
        return [name for name, resident in self.residents.items() if resident.on_device]

    def _held(self, phase: PhaseConfig) -> dict[str, int]:
        return {name: self.residents[name].bytes() for name in phase.residents}
