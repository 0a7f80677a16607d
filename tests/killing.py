"""Runs that tests kill, stop and starve: started in the background, read line by line, looked at afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launch import environment, free_port


class Run:
    """`python -m rlpost arguments…` (ranks 0), or under torchrun. prefix: a command before it.

    Attributes: lines, what it printed so far; every process of it is gone after `end`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        ranks: int = 0,
        *,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ):
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
        self.ranks, self.lines = ranks, []
        self.process = subprocess.Popen(
            [*prefix, sys.executable, *(launcher if ranks else []), "-m", "rlpost", *arguments],
            env=environment(**(env or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # as a shell does: Ctrl-C reaches the group
        )
        self._news = threading.Condition()
        self._over = False
        self._pids: set[int] = set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str, timeout: float = 180, *, times: int = 1) -> bool:
        """That many lines that match; False where the run ended without them."""

        def seen() -> bool:
            return sum(re.search(pattern, line) is not None for line in self.lines) >= times

        with self._news:
            self._news.wait_for(lambda: self._over or seen(), timeout)
            assert self._over or seen(), f"no {pattern!r} within {timeout} s:\n{self.text}"
            return seen()

    def wait_until(self, condition: Callable[[], bool], timeout: float = 180) -> bool:
        """Something outside, looked at often; False where the run ended before."""
        until = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < until, f"not within {timeout} s:\n{self.text}"
            time.sleep(0.0003)
        return True

    def pids(self) -> list[int]:
        """Of the ranks, in their order; of the one process without torchrun."""
        found = [self.process.pid] if not self.ranks else children(self.process.pid)
        for pid in found:
            self._pids |= {pid, *descendants(pid)}
        return found

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids()[rank], number)

    def kill_all(self) -> None:
        """Everything at once, as a machine that loses its power."""
        ranks = self.pids()
        os.kill(self.process.pid, signal.SIGSTOP)  # the launcher must not see the ranks die
        for pid in [*ranks, self.process.pid]:
            os.kill(pid, signal.SIGKILL)

    def end(self, timeout: float = 180) -> tuple[int, float]:
        """(exit code, seconds until everything was gone). Fails where a process outlives the run."""
        begun = time.monotonic()
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"still there after {timeout} s:\n{self.text}") from None
        while left := [pid for pid in self._pids if alive(pid)]:
            assert time.monotonic() - begun < timeout, f"processes {left} outlive the run:\n{self.text}"
            time.sleep(0.01)
        seconds = time.monotonic() - begun
        self._reader.join(10)
        return code, seconds


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def descendants(pid: int) -> list[int]:
    return [deeper for child in children(pid) for deeper in (child, *descendants(child))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
