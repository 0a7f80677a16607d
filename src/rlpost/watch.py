"""The watch-dog: one thread of each rank that ends the rank where its main thread cannot.

It looks for three things: another rank's failure, a rank of this machine whose process is gone, and a phase over its
time limit. A phase over its limit leaves every rank's stacks in `<run>/stacks/rank_<r>.txt`, and
one sentence says which ranks hang and which only wait for them. A phase that takes long is spoken of meanwhile.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from rlpost.failures import PhaseError, report
from rlpost.launcher import follow_launcher
from rlpost.observe.logs import NOTICE
from rlpost.observe.progress import duration
from rlpost.parallel import all_gather_objects
from rlpost.proc import is_handling, process

log = logging.getLogger(__name__)

GRACE_S = 3.0  # for a rank to meet a failure by itself, before its watch-dog ends it
LOOK_S = 0.25  # between two looks
LONG_S = 30.0  # after which it is said how long work takes, and again after twice the time
ANSWER_S = 2.0  # for the other ranks to say where they are
STACKS_S = 1.0  # at most, for C code to write the stacks
BACKSTOP_S = 8.0  # after the limit: where no thread of Python runs any more, C code ends the process
APART_S = 0.25  # between the ranks of a machine there, so that their stacks do not mix on the terminal
ERROR, HANG = "error", "hang"


@dataclass(frozen=True)
class Peer:
    """A rank's process, as the others of its machine can look at it."""

    rank: int
    host: str
    pid: int
    born: str  # the kernel's clock ticks: another process may get the same number later
    stacks: int  # the descriptor that it writes its stacks to on SIGUSR1, even where it runs no Python code

    @property
    def alive(self) -> bool:
        now = process(self.pid)
        return now.born == self.born and now.alive


@dataclass
class Work:
    """What this rank does now. limit_s 0: without a limit. field: where the limit comes from."""

    phase: str
    step: int
    limit_s: float
    field: str
    begun: float
    tell_at_s: float = LONG_S

    @property
    def left_s(self) -> float:
        return self.begun + self.limit_s - time.monotonic() if self.limit_s else float("inf")


class Watch:
    """Of one rank. store: the ranks' common key-value store; directory: the run's, None where there is none.

    Every rank builds one at the same point. Attributes: raised, set where the main thread has the failure already;
    answered, a hang was found and this rank has said where it is.
    """

    def __init__(self, rank: int, store: dist.Store, directory: Path | None):
        self.rank, self.store, self.directory = rank, store, directory
        self.raised = threading.Event()
        self._closed = threading.Event()
        self._work: Work | None = None
        self.answered = False
        self._stacks = _stacks()
        if not faulthandler.is_enabled():
            faulthandler.enable(file=2)  # a crash in C code says where it was
        born = process(os.getpid()).born
        me = Peer(rank, socket.gethostname(), os.getpid(), born, self._stacks)
        self._peers: list[Peer] = all_gather_objects(me)
        self._neighbours = [p for p in self._peers if p.host == me.host and p.rank != rank and p.alive]
        follow_launcher()
        atexit.register(self.close)
        threading.Thread(target=self._run, name="rlpost-watch", daemon=True).start()

    @contextmanager
    def during(self, phase: str, step: int, limit_s: float, field: str) -> Iterator[None]:
        """The main thread works on this; ends the run where that takes longer than limit_s seconds (0: never)."""
        former, self._work = self._work, Work(phase, step, limit_s, field, time.monotonic())
        self._arm_backstop()
        try:
            yield
        finally:
            self._work = former
            self._arm_backstop()

    def post(self, error: PhaseError) -> PhaseError:
        """Tell all ranks; the first failure wins and is returned."""
        return PhaseError.decode(self.store.compare_set(ERROR, "", error.encode()))

    def posted(self) -> PhaseError | None:
        return PhaseError.decode(self.store.get(ERROR)) if self.store.check([ERROR]) else None

    def ended(self) -> PhaseError | None:
        """The failure, also where it is still being put together: what hung may go on meanwhile, the run does not. A
        rank that was stopped has not heard of it yet, but its clock went on."""
        until = time.monotonic() + ANSWER_S + GRACE_S
        over = self._work is not None and self._work.left_s < 0
        while (self.answered or over) and self.store.check([HANG]) and time.monotonic() < until:
            if error := self.posted():
                return error
            time.sleep(0.02)
        return None

    def lost(self) -> Peer | None:
        """A rank of this machine whose process ended without saying goodbye."""
        for peer in self._neighbours:
            if not peer.alive and not self.store.check([f"left/{peer.rank}"]):
                return peer
        return None

    def post_lost(self, phase: str, step: int) -> PhaseError | None:
        """Tell all ranks of a rank that cannot tell it any more, if there is one."""
        if (peer := self.lost()) is None:
            return None
        message = f"its process {peer.pid} is gone: it was killed (where memory is short, by the system) or crashed"
        return self.post(PhaseError(peer.rank, phase, step, message, reporter=self.rank))

    def close(self) -> None:
        """The end as it should be: nobody waits for this rank any more."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._work = None
        self._arm_backstop()
        try:
            self.store.set(f"left/{self.rank}", "")
        except dist.DistError:
            log.info("the store is gone before this rank")

    def _arm_backstop(self) -> None:
        """Where no thread of Python gets the interpreter: C code writes the stacks to the terminal and exits."""
        work = self._work
        if work is None or not work.limit_s:
            faulthandler.cancel_dump_traceback_later()
        else:
            turn_s = APART_S * sum(peer.rank < self.rank for peer in self._neighbours)
            faulthandler.dump_traceback_later(max(work.left_s, 0) + BACKSTOP_S + turn_s, exit=True, file=2)

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S) and not self.raised.is_set():
            try:
                self._look()
            except dist.DistError as error:
                log.info("the ranks' store is gone, and what holds it: %s", error)
                return
        # Where the main thread has the failure, it ends the process.

    def _look(self) -> None:
        work = self._work
        if work is not None and (took := time.monotonic() - work.begun) >= work.tell_at_s:
            work.tell_at_s *= 2
            log.log(NOTICE, "%s (step %d) has run for %s", work.phase, work.step, duration(took))
        if self.store.check([HANG]):
            self._answer(json.loads(self.store.get(HANG)))
        elif work is not None and work.left_s < 0:
            mine = json.dumps([self.rank, work.phase, work.step, work.limit_s, work.field])
            self._answer(json.loads(self.store.compare_set(HANG, "", mine)))
        error = self.posted()
        if error is None and work is not None:
            error = self.post_lost(work.phase, work.step)
        if error is not None and not self.raised.wait(GRACE_S):
            report(error, self.directory)
            os._exit(1)

    def _answer(self, hang: list[Any]) -> None:
        """Say where this rank is; the one that found the hang puts the answers together."""
        if self.answered:
            return
        self.answered = True
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        self._keep_stacks(self.rank, Path(f"/proc/self/fd/{self._stacks}"))
        frame = sys._current_frames()[threading.main_thread().ident]
        shown = "".join(traceback.format_stack(frame)[-6:])
        os.write(2, f"\nrank {self.rank}, main thread:\n{shown}".encode())
        self.store.set(f"where/{self.rank}", json.dumps(where(frame)))
        if hang[0] == self.rank:
            self._conclude(*hang[1:])

    def _conclude(self, phase: str, step: int, limit_s: float, field: str) -> None:
        places: dict[int, tuple[bool, str]] = {}
        until = time.monotonic() + ANSWER_S
        while len(places) < len(self._peers) and time.monotonic() < until:
            for peer in self._peers:
                if peer.rank not in places and self.store.check([f"where/{peer.rank}"]):
                    places[peer.rank] = tuple(json.loads(self.store.get(f"where/{peer.rank}")))
            time.sleep(0.02)
        silent = [peer for peer in self._peers if peer.rank not in places]
        held_here = [peer for peer in silent if peer in self._neighbours and peer.alive]
        for peer in held_here:
            self._take_stacks(peer)
        rank, message = verdict(places, [peer.rank for peer in silent])
        kept = f"; the stacks of all ranks are in {self.directory / 'stacks'}" if self.directory else ""
        self.post(
            PhaseError(rank, phase, step, f"no end after {limit_s:g} s ({field}): {message}{kept}", reporter=self.rank)
        )
        for peer in held_here:
            with suppress(ProcessLookupError):
                os.kill(peer.pid, signal.SIGKILL)

    def _take_stacks(self, peer: Peer) -> None:
        """Of a rank of this machine that runs no Python code: on SIGUSR1 its C code writes them, before all else. It is
        stopped again, so that it does nothing more."""
        file = Path(f"/proc/{peer.pid}/fd/{peer.stacks}")
        with suppress(OSError):  # it may be gone meanwhile
            _signal_main_thread(peer.pid, signal.SIGUSR1)
            os.kill(peer.pid, signal.SIGCONT)
            until = time.monotonic() + STACKS_S
            while is_handling(peer.pid, signal.SIGUSR1) and time.monotonic() < until:
                time.sleep(0.005)
            os.kill(peer.pid, signal.SIGSTOP)
            self._keep_stacks(peer.rank, file)

    def _keep_stacks(self, rank: int, source: Path) -> None:
        if self.directory is None:
            return
        try:
            path = self.directory / "stacks" / f"rank_{rank}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(source.read_bytes())
        except OSError as error:
            log.error("the stacks of rank %d are not kept: %s", rank, error)


@cache
def _stacks() -> int:
    """A file in memory, one for this process, to which C code writes the stacks on SIGUSR1."""
    descriptor = os.memfd_create("rlpost-stacks")
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True, chain=False)
    return descriptor


def _signal_main_thread(pid: int, number: int) -> None:
    """os.kill lets any thread take a signal: the main thread of a process that was stopped would go on meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    to_thread = getattr(libc, "tgkill", None)  # glibc 2.30
    if to_thread is None:
        os.kill(pid, number)
    elif to_thread(pid, pid, number):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def verdict(places: Mapping[int, tuple[bool, str]], silent: list[int]) -> tuple[int, str]:
    """(the first rank that hangs, who hangs where). places: rank -> (it waits for others, where it is)."""
    busy = sorted(rank for rank, (waits, _) in places.items() if not waits)
    parts = [f"rank {rank} does not respond" for rank in silent]
    parts += [f"rank {rank} is at {places[rank][1]}" for rank in busy]
    waiting = sorted(rank for rank, (waits, _) in places.items() if waits)
    if not parts:
        return waiting[0], "all ranks wait for each other: " + ", ".join(f"rank {r} at {places[r][1]}" for r in waiting)
    if waiting:
        parts.append(f"rank {', '.join(map(str, waiting))} only wait{'s' if len(waiting) == 1 else ''} for others")
    return min(silent + busy), "; ".join(parts)


def where(frame: FrameType | None) -> tuple[bool, str]:
    """(does this stack wait for other ranks, its innermost place outside of Python's own library)."""
    stdlib, place, waits = sysconfig.get_path("stdlib"), None, False
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        waits |= "/torch/distributed/" in file or (file.endswith("rlpost/phases.py") and name == "meet")
        own = "site-packages" in file or not (file.startswith(stdlib) or file.startswith("<"))
        if place is None and own:
            place = f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno} ({name})"
        frame = frame.f_back
    return waits, place or "an unknown place"
