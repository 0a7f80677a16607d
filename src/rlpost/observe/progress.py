"""What a person reads while a run goes on and when it is done: the progress line and the summary."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TextIO


class Progress:
    """step/total, reward, loss, tokens/s, ETA: a line a step; on a terminal one line that is written over, with the
    phase that runs. May be called from any thread."""

    def __init__(self, total: int, stream: TextIO | None = None):
        self.total = total
        self.stream = sys.stderr if stream is None else stream
        self._rewrites = self.stream.isatty()
        self._line = f"step {0:>{len(str(total))}}/{total}"
        self._shown = ""  # what stands on the terminal's current line
        self._step_s: float | None = None
        self._before = time.perf_counter()
        self._lock = threading.RLock()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """step: steps done; the time of a step is `perf/step_s`, or what passed since the last call."""
        now = time.perf_counter()
        took = metrics.get("perf/step_s", now - self._before)
        self._before = now
        # Recent steps say more about the ones to come, one odd step little.
        self._step_s = took if self._step_s is None else 0.7 * self._step_s + 0.3 * took
        parts = [f"step {step:>{len(str(self.total))}}/{self.total}"]
        for label, name in (("reward", "rollout/reward/mean"), ("loss", "train/loss")):
            if name in metrics:
                parts.append(f"{label} {metrics[name]:.4g}")
        if metrics.get("train/skipped"):
            parts.append("skipped")
        if "perf/tokens_per_s" in metrics:
            parts.append(f"{_short(metrics['perf/tokens_per_s'])} tokens/s")
        parts += [f"{took:.3g} s/step", f"ETA {duration(self._step_s * max(0, self.total - step))}"]
        with self._lock:
            self._line = "  ".join(parts)
            if self._rewrites:
                self._show(self._line)
            else:
                print(self._line, file=self.stream, flush=True)

    def phase(self, name: str) -> None:
        """The phase that begins, behind the line on a terminal."""
        if self._rewrites:
            with self._lock:
                self._show(f"{self._line}  · {name}")

    def say(self, message: str) -> None:
        """A line of its own, above the progress line."""
        with self._lock:
            shown = self._shown
            self._clear()
            print(message, file=self.stream, flush=True)
            if shown:
                self._show(shown)

    def close(self) -> None:
        """Leave the last line standing."""
        with self._lock:
            if self._shown:
                self._show(self._line)
                print(file=self.stream, flush=True)
                self._shown = ""

    def _show(self, line: str) -> None:
        self._clear()
        self._shown = line[: shutil.get_terminal_size().columns - 1]  # what wraps cannot be written over
        print(self._shown, end="", file=self.stream, flush=True)

    def _clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=self.stream)  # with what a Ctrl-C wrote behind it
            self._shown = ""


def duration(seconds: float) -> str:
    """1:02:03, or 2:03 under an hour."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def human_bytes(count: float) -> str:
    """For people: 1.5 GiB."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:{'.3g' if count < 1000 * factor else '.0f'}} {unit}"
    return f"{count:.0f} bytes"


def _short(value: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def summary(run_dir: str | Path, rows: list[Mapping[str, float]], seconds: float | None = None) -> str:
    """The end of a run: how reward and evaluations moved, where a step's time goes, and where everything is.
    rows: those of metrics.jsonl."""
    run_dir = Path(run_dir)
    last = rows[-1]["step"] if rows else 0
    clock = f" in {duration(seconds)}" if seconds is not None else ""
    lines = [f"{run_dir.name}: {last} steps{clock}"]
    names = sorted({name for row in rows for name in row if name.startswith("eval/") and "/mean@" in name})
    for name in ["rollout/reward/mean", *names]:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            moved = f"{values[0]:.4g}" if len(values) == 1 else f"{values[0]:.4g} → {values[-1]:.4g}"
            lines.append(f"  {name.removesuffix('/mean') if name.startswith('rollout') else name}: {moved}")
    if took := step_seconds(rows):
        whole = took.pop("step")
        parts = ", ".join(f"{phase} {took[phase]:.3g}" for phase in took)
        lines.append(f"  seconds of a step, median: {whole:.3g}" + (f" ({parts})" if parts else ""))
    places = {
        "model": "export",
        "plots": "plots/overview.png",
        "metrics": "metrics.jsonl",
        "samples": "rollouts",
        "checkpoints": "checkpoints",
        "tensorboard": "tensorboard",
        "timeline": "timeline.json",
        "log": "log.txt",
    }
    present = {what: run_dir / place for what, place in places.items() if (run_dir / place).exists()}
    width = max((len(what) for what in present), default=0)
    return "\n".join([*lines, *(f"  {what:<{width}}  {path}" for what, path in present.items())])


def step_seconds(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median seconds of a `step` and of each phase, where it ran; empty without steps."""
    names = [name for row in rows if "perf/step_s" in row for name in row if re.fullmatch(r"perf/\w+_s", name)]
    found = {}
    for name in dict.fromkeys(names):
        if name != "perf/tokens_per_s":
            found[name.removeprefix("perf/").removesuffix("_s")] = median(row[name] for row in rows if name in row)
    return found
