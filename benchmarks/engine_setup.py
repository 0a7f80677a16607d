"""What the benchmarks of engines share: an engine from command line options, a stopwatch, and printing."""

from __future__ import annotations

import argparse
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from models import SHAPES

from rlpost.parallel import rank
from rlpost.rollout.engine import Engine

GIB = 2**30
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32  # SGLang's CPU kernels here know fp32 alone


def add_engine_options(parser: argparse.ArgumentParser, memory_fraction: float) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="another number of layers than the shape's")
    parser.add_argument("--engine", choices=["sglang", "torch"], default="sglang")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="of the engine; with torchrun, as many ranks")
    parser.add_argument("--memory-fraction", type=float, default=memory_fraction, help="(default: %(default)s)")
    parser.add_argument("--max-batch", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs: a faster start, a slower engine")


def start_engine(given: argparse.Namespace, path: str, extra: dict[str, Any] | None = None) -> Engine:
    if given.engine == "torch":
        from rlpost.rollout.engines.torch import TorchEngine

        engine = TorchEngine(path, dtype=DTYPE, max_batch=given.max_batch)
    else:
        from rlpost.rollout.engines.sglang import SGLangEngine

        engine = SGLangEngine(
            path,
            dtype=DTYPE,
            tensor_parallel=given.tensor_parallel,
            memory_fraction=given.memory_fraction,
            max_batch=given.max_batch,
            extra=(extra or {}) | ({"disable_cuda_graph": True} if given.no_graphs else {}),
        )
    start = time.perf_counter()
    engine.start()
    say(f"engine started in {time.perf_counter() - start:.1f} s")
    return engine


def hardware() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def say(text: str) -> None:
    if rank() == 0:
        print(text, flush=True)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_bytes() -> int:
    """Of the device; 0 on the CPU, where nothing is given back."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def seconds_of(call: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def spread(values: list[float], digits: int = 1, factor: float = 1e3) -> str:
    """Median and range."""
    middle, least, most = (factor * value for value in (median(values), min(values), max(values)))
    return f"{middle:.{digits}f} ({least:.{digits}f}–{most:.{digits}f})"


class Table:
    """Rows that are printed as they come, and once more, as one table, at the end. `failed` is set where a part ended
    with an exception; the others go on."""

    def __init__(self, *columns: str):
        self.columns, self.rows, self.failed = columns, [], False

    def add(self, *cells: object) -> None:
        self.rows.append([str(cell) for cell in cells])
        say("  " + " | ".join(self.rows[-1]))

    def part(self, name: str, call: Callable[[], None]) -> None:
        say(f"{name} …")
        try:
            call()
        except Exception:  # what was measured before and what follows is worth having
            traceback.print_exc()
            self.add(name, "failed, see above")
            self.failed = True

    def show(self) -> None:
        rows = [*[list(self.columns)], *self.rows]
        count = len(self.columns)
        lines = ["| " + " | ".join([*row, *[""] * (count - len(row))]) + " |" for row in rows]
        say("\n" + "\n".join([lines[0], "|" + " --- |" * count, *lines[1:]]))


class Stopwatch:
    """Seconds by label of wrapped calls, each without the wrapped calls inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = [0.0]  # per open span: seconds of the spans inside it
        self._wrapped: list[tuple[Any, str, Any]] = []

    @contextmanager
    def span(self, label: str) -> Iterator[None]:
        start = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self.seconds[label] += took - self._inside.pop()
            self._inside[-1] += took

    def wrap(self, owner: Any, name: str, label: str) -> None:
        call = self._keep(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            with self.span(label):
                return call(*arguments, **keywords)

        setattr(owner, name, timed)

    def wrap_iterator(self, owner: Any, name: str, label: str) -> None:
        """Of a call that returns an iterator: the seconds that its items take."""
        call = self._keep(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Iterator[Any]:
            items = iter(call(*arguments, **keywords))
            while True:
                with self.span(label):
                    item = next(items, self)
                if item is self:
                    return
                yield item

        setattr(owner, name, timed)

    def unwrap(self) -> None:
        for owner, name, call in self._wrapped:
            setattr(owner, name, call)
        self._wrapped.clear()

    def _keep(self, owner: Any, name: str) -> Callable[..., Any]:
        call = getattr(owner, name)
        self._wrapped.append((owner, name, call))
        return call
