"""What a person reads while a run goes on and when it is done: the progress line, log.txt, the summary."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TextIO

FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class Progress:
    """step/total, reward, loss, tokens/s, ETA: a line that is written over on a terminal, one per step elsewhere."""

    def __init__(self, total: int, stream: TextIO | None = None):
        self.total = total
        self.stream = sys.stderr if stream is None else stream
        self._rewrites = self.stream.isatty()
        self._shown = ""  # what stands on the terminal's current line
        self._step_s: float | None = None
        self._before = time.perf_counter()

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
        self._show("  ".join(parts))

    def say(self, message: str) -> None:
        """A line of its own, above the progress line."""
        shown = self._shown
        self._clear()
        print(message, file=self.stream, flush=True)
        if shown:
            self._show(shown)

    def close(self) -> None:
        """Leave the last line standing."""
        if self._shown:
            print(file=self.stream, flush=True)
            self._shown = ""

    def _show(self, line: str) -> None:
        if not self._rewrites:
            print(line, file=self.stream, flush=True)
            return
        self._clear()
        print(line, end="", file=self.stream, flush=True)
        self._shown = line

    def _clear(self) -> None:
        if self._shown:
            print("\r" + " " * len(self._shown) + "\r", end="", file=self.stream)
            self._shown = ""


def duration(seconds: float) -> str:
    """1:02:03, or 2:03 under an hour."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


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


def setup_logging(run_dir: str | Path, rank: int = 0) -> logging.Handler:
    """Send the library's log to `<run_dir>/log.txt`: everything of rank 0, the other ranks' warnings. Returns the
    handler; a second call replaces the first's (a notebook starts several runs)."""
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("rlpost")
    for handler in [h for h in logger.handlers if isinstance(h, _RunLog)]:
        logger.removeHandler(handler)
        handler.close()
    handler = _RunLog(Path(run_dir) / "log.txt", encoding="utf-8")
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    handler.setFormatter(logging.Formatter(FORMAT if rank == 0 else f"[rank {rank}] {FORMAT}"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler


class _RunLog(logging.FileHandler):
    """Known by its class, so that no handler of the user's is ever removed."""

    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be written (the disk is full) is lost; logging would show a traceback for each."""
