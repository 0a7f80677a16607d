"""Calls in processes of their own, for rewards that may crash or never give the interpreter back (reward.isolate=true).

A call travels as a pickle to a child, which runs one after the other; its time begins when the child has unpacked it
(and imported what it needs). A child that takes too long is killed, one that
crashes is gone; the next call gets a new one. `python -m rlpost.rewards.processes` is the child.
"""

from __future__ import annotations

import math
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
BEGUN, RESULT = "begun", "result"  # what a child says of a call


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
                        child.close()
                        continue
                    except Exception as error:  # pickle raises what it likes: this call cannot travel
                        self._idle.append(child)
                        results[number] = error
                        continue
                    busy[number] = (child, math.inf)
                    selector.register(child.output, selectors.EVENT_READ, number)
                first = min((deadline for _, deadline in busy.values()), default=0.0)
                wait = None if first == math.inf else max(0.0, first - time.monotonic())
                ready = [key.data for key, _ in selector.select(wait)]
                late = [n for n, (_, deadline) in busy.items() if n not in ready and deadline <= time.monotonic()]
                for number in [*ready, *late]:
                    child, _ = busy[number]
                    what, value = child.give_up(timeout) if number in late else child.receive()
                    if what == BEGUN:
                        busy[number] = (child, time.monotonic() + timeout)
                        continue
                    results[number] = value
                    selector.unregister(child.output)
                    del busy[number]
                    if child.runs:
                        self._idle.append(child)
                    else:
                        child.close()
        return results


class _Child:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # a result that a buffer holds would never be selected
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        self.output: BinaryIO = self._process.stdout

    @property
    def runs(self) -> bool:
        return self._process.returncode is None

    def send(self, call: Callable[[], Any]) -> None:
        _send(self._process.stdin, call)

    def receive(self) -> tuple[str, Any]:
        try:
            return _receive(self.output)
        except EOFError:
            return RESULT, self.crashed()

    def give_up(self, timeout: float) -> tuple[str, TimeoutError]:
        self._process.kill()
        self._process.wait()
        return RESULT, TimeoutError(f"no result within {timeout:g} s")

    def crashed(self) -> RuntimeError:
        code = self._process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return RuntimeError(f"its process ended ({how})")

    def close(self) -> None:
        self._process.stdout.close()
        self._process.stdin.close()


def _send(stream: BinaryIO, value: Any) -> None:
    pickled = pickle.dumps(value)
    data = memoryview(HEADER.pack(len(pickled)) + pickled)
    while data:
        data = data[stream.write(data) :]


def _receive(stream: BinaryIO) -> Any:
    """EOFError where the other side is gone."""
    (length,) = HEADER.unpack(_read(stream, HEADER.size))
    return pickle.loads(_read(stream, length))


def _read(stream: BinaryIO, length: int) -> bytes:
    data = b""
    while len(data) < length:
        if not (more := stream.read(length - len(data))):
            raise EOFError
        data += more
    return data


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
    calls, results = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a reward prints must not stand between results
    while True:
        try:
            call = _receive(calls)
        except EOFError:
            return
        except Exception as error:  # the module of the reward cannot be imported here, or raises what it likes
            _send(results, (RESULT, _sendable(error)))
            continue
        _send(results, (BEGUN, None))
        _send(results, (RESULT, _sendable(answer(call))))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
