"""Calls in processes of their own, for rewards that may crash or never give the interpreter back (reward.isolate=true).

A call travels as a pickle to a child, which runs one after the other. A child that takes too long is killed, one that
crashes is gone; the next call gets a new one. `python -m rlpost.rewards.processes` is the child.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from rlpost.launcher import die_with_parent
from rlpost.rewards.workers import answer

HEADER = struct.Struct("<Q")  # the length of the pickle after it


class ProcessPool:
    """At most `size` children, started when they are first needed."""

    def __init__(self, size: int):
        self.size = size
        self._idle: list[_Child] = []

    def run_all(self, calls: Sequence[Callable[[], Any]], timeout: float) -> list[Any]:
        """As `workers.run_all`: each call's result, or the exception that it raised; TimeoutError after `timeout`
        seconds. RuntimeError where its process crashed."""
        results: list[Any] = [None] * len(calls)
        waiting = list(reversed(range(len(calls))))
        with selectors.DefaultSelector() as selector:
            busy: dict[int, tuple[_Child, float]] = {}
            while waiting or busy:
                while waiting and len(busy) < self.size:
                    number = waiting.pop()
                    child = self._idle.pop() if self._idle else _Child()
                    try:
                        child.send(calls[number])
                    except BrokenPipeError:
                        results[number] = child.crashed()
                        continue
                    except Exception as error:  # pickle raises what it likes: this call cannot travel
                        self._idle.append(child)
                        results[number] = error
                        continue
                    busy[number] = (child, time.monotonic() + timeout)
                    selector.register(child.output, selectors.EVENT_READ, number)
                first = min((deadline for _, deadline in busy.values()), default=time.monotonic())
                ready = [key.data for key, _ in selector.select(max(0.0, first - time.monotonic()))]
                late = [n for n, (_, deadline) in busy.items() if n not in ready and deadline <= time.monotonic()]
                for number in [*ready, *late]:
                    child, _ = busy.pop(number)
                    selector.unregister(child.output)
                    if number in late:
                        child.kill()
                        results[number] = TimeoutError(f"no result within {timeout:g} s")
                        continue
                    try:
                        results[number] = _receive(child.output)
                        self._idle.append(child)
                    except EOFError:
                        results[number] = child.crashed()
        return results


class _Child:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        self.output: BinaryIO = self._process.stdout

    def send(self, call: Callable[[], Any]) -> None:
        _send(self._process.stdin, call)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._process.stdin.close()

    def crashed(self) -> RuntimeError:
        code = self._process.wait()
        self.kill()
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return RuntimeError(f"its process ended ({how})")


def _send(stream: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


def _receive(stream: BinaryIO) -> Any:
    """EOFError where the other side is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    (length,) = HEADER.unpack(header)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


def _sendable(result: Any) -> Any:
    """What the parent can read, too: an exception of a class that only this process has becomes its text."""
    try:
        pickle.loads(pickle.dumps(result))
    except Exception as error:  # whatever a user's __reduce__ raises
        if isinstance(result, Exception):
            return RuntimeError(f"{type(result).__name__}: {result}")
        return TypeError(f"returned {result!r:.80}, which cannot be sent to another process: {error}")
    return result


def _serve(parent: int) -> None:
    """The child: calls in, results out, until the parent is gone."""
    # A reward that hangs here must not outlive a parent that was killed: the kernel sees to it.
    die_with_parent()
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the trainer decides when it ends
        signal.signal(number, signal.SIG_IGN)
    calls, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a reward prints must not stand between results
    while True:
        try:
            call = _receive(calls)
        except EOFError:
            return
        except Exception as error:  # the module of the reward cannot be imported here, or raises what it likes
            _send(results, _sendable(error))
            continue
        _send(results, _sendable(answer(call)))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
