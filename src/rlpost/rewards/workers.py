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
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    deadlines: dict[int, float] = {}
    started = 0

    def work(number: int) -> None:
        done.put((number, answer(calls[number])))

    while started < len(calls) or deadlines:
        while started < len(calls) and len(deadlines) < workers:
            deadlines[started] = time.monotonic() + timeout
            threading.Thread(target=work, args=(started,), daemon=True, name=f"reward-{started}").start()
            started += 1
        try:
            number, result = done.get(timeout=max(0.0, min(deadlines.values()) - time.monotonic()))
            if deadlines.pop(number, None) is not None:
                results[number] = result
        except queue.Empty:
            now = time.monotonic()
            for number in [n for n, deadline in deadlines.items() if deadline <= now]:
                del deadlines[number]
                results[number] = TimeoutError(f"no result within {timeout:g} s")
    return results
