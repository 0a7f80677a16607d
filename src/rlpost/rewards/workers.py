"""Runs many small calls at once, each with a time limit of its own."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any


async def _awaited(value: Any) -> Any:
    return await value


def answer(call: Callable[[], Any]) -> Any:
    """The call's result (awaited where it is a coroutine), or the exception that it raised."""
    try:
        value = call()
        return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value
    except Exception as error:  # whatever a user's reward raises is its result here
        return error
    except BaseException as error:  # sys.exit() in a reward ends neither the thread in silence nor the run
        return RuntimeError(f"{type(error).__name__}: {error}")


def run_all(calls: Sequence[Callable[[], Any]], timeout: float, workers: int) -> list[Any]:
    """Each call's result, or the exception that it raised; TimeoutError after `timeout` seconds of running.

    Calls may be sync or return an awaitable. One that hangs is left behind in a daemon thread, which neither holds up
    the others nor the end of the process; its late result is nobody's. A call that never gives the interpreter back
    (one regular expression that backtracks for hours) stops every thread, and one that crashes ends the process: such
    calls belong in `processes.ProcessPool`.
    """
    results: list[Any] = [None] * len(calls)
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    begun: dict[int, float] = {}  # those that run; workers write it, so it is copied before it is gone through
    late: set[int] = set()
    for number in range(len(calls)):
        waiting.put(number)

    def work() -> None:
        number = None
        while number not in late:  # who was late has been replaced
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            begun[number] = time.monotonic()
            done.put((number, answer(calls[number])))

    def start_worker() -> None:
        threading.Thread(target=work, daemon=True, name="reward").start()

    for _ in range(min(workers, len(calls))):
        start_worker()
    left = len(calls)
    while left:
        # Who begins while this waits is late after it: the first to be looked at is known.
        first = min(begun.copy().values(), default=time.monotonic())
        try:
            number, result = done.get(timeout=max(0.0, first + timeout - time.monotonic()))
            if number not in late:
                del begun[number]
                results[number] = result
                left -= 1
        except queue.Empty:
            now = time.monotonic()
            for number in [n for n, since in begun.copy().items() if since + timeout <= now]:
                late.add(number)
                del begun[number]
                results[number] = TimeoutError(f"no result within {timeout:g} s")
                left -= 1
                start_worker()
    return results
