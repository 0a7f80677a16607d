"""Everything a run writes for people, behind a few calls. Rank 0 writes; the others only log their warnings."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.config.compose import dump_config
from rlpost.config.schema import Config
from rlpost.observe.logs import NOTICE, remove_handlers, setup_logging
from rlpost.observe.metrics import MetricsLog, read_metrics
from rlpost.observe.plots import plot_run
from rlpost.observe.progress import Progress, summary
from rlpost.observe.records import RolloutRecords
from rlpost.observe.timeline import Timeline
from rlpost.observe.trackers import Trackers
from rlpost.weights.shards import replace_text

if TYPE_CHECKING:
    from rlpost.phases import PhaseReport
    from rlpost.types import Sample

log = logging.getLogger(__name__)


class Observer:
    """metrics.jsonl, rollouts/, TensorBoard, plots/, timeline.json, log.txt, the progress line and the summary."""

    def __init__(self, config: Config, directory: Path, *, rank: int = 0):
        """The logs and the terminal; the other files are `begin`'s."""
        self.config, self.directory, self.writes = config, directory, rank == 0
        self.last: dict[str, float] = {}
        self._progress = Progress(config.trainer.steps)
        self._shows = self.writes and config.tracker.progress
        show = self._progress.say if self.writes else None
        self._handlers = setup_logging(directory, rank, show, NOTICE if self._shows else logging.WARNING)
        self._start = time.perf_counter()
        self._phase_seconds: dict[str, float] = {}
        self._peak_bytes = 0

    def begin(self, steps_done: int = 0) -> None:
        """All is built, and the run can start: what an earlier try of it wrote for later steps goes away."""
        if not self.writes:
            return
        config, directory = self.config, self.directory
        replace_text(directory / "config.yaml", dump_config(config))
        self._metrics, self._records = MetricsLog(directory), RolloutRecords(directory)
        # A run that goes on writes its later steps again. Evaluations stand under the number of steps done before.
        self._metrics.cut_after(steps_done)
        self._records.cut_after(steps_done)
        self._timeline = Timeline(directory)
        self._trackers = Trackers(
            directory, tensorboard=config.tracker.tensorboard, wandb=config.tracker.wandb, name=config.run.name
        )

    def phase_begins(self, name: str) -> None:
        if self._shows:
            self._progress.phase(name)

    def phase_done(self, report: PhaseReport) -> None:
        self._phase_seconds[report.name] = self._phase_seconds.get(report.name, 0.0) + report.seconds
        self._peak_bytes = max(self._peak_bytes, report.peak_bytes)
        if self.writes:
            self._timeline.record(
                report.name,
                report.start,
                report.start + report.seconds,
                step=report.step,
                moved_bytes=report.moved_bytes,
                resident_bytes=report.resident_bytes,
                peak_bytes=report.peak_bytes,
                device_bytes=report.device_bytes,
            )

    def step_done(
        self, step: int, samples: Sequence[Sample], metrics: Mapping[str, float], seconds: float
    ) -> dict[str, float]:
        """step: steps done, this one included. Adds perf/… to the metrics and writes everything of the step."""
        tokens = sum(len(sample.ids) for sample in samples)
        self.last = {
            **metrics,
            "train/tokens": float(tokens),
            "perf/step_s": seconds,
            **{f"perf/{name}_s": took for name, took in self._phase_seconds.items()},
            "perf/tokens_per_s": tokens / seconds,
            "perf/peak_bytes": float(self._peak_bytes),
        }
        self._phase_seconds = {}
        if self.writes:
            self._metrics.write(step, self.last)
            self._trackers.log(step, self.last)
            if self.config.tracker.rollouts:
                self._records.write("train", step, samples)
            if self._shows:
                self._progress.update(step, self.last)
        return {"step": step, **self.last}

    def eval_done(self, step: int, name: str, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """An evaluation after `step` steps: a line of its own in metrics.jsonl. It replaces an earlier one of the same
        step, which a run has that was killed between the evaluation and the next checkpoint."""
        if not self.writes:
            return
        self._metrics.drop(lambda row: row["step"] == step and any(key.startswith(f"eval/{name}/") for key in row))
        self._metrics.write(step, metrics)
        self._trackers.log(step, metrics)
        if self.config.tracker.rollouts:
            self._records.drop_eval(step, name)
            self._records.write("eval", step, samples, eval=name)
        shown = ", ".join(f"{key.removeprefix(f'eval/{name}/')} {value:.4g}" for key, value in metrics.items())
        self.say(f"eval {name} after {step} steps: {shown}")

    def say(self, message: str) -> None:
        """A line for the person at the terminal, and for log.txt."""
        log.info(message)
        if self._shows:  # by itself: a notebook's other run may have the logs at the moment
            self._progress.say(message)

    def rows(self) -> list[dict[str, Any]]:
        """What metrics.jsonl holds so far."""
        return read_metrics(self.directory) if (self.directory / "metrics.jsonl").exists() else []

    def plot(self) -> Any:
        return plot_run(self.directory)

    def finish(self, *, plots: bool) -> None:
        """The end of a run: the pictures, and where everything is."""
        if not self.writes:
            return
        if plots:
            plot_run(self.directory)
        if self._shows:
            self._progress.close()
            print(summary(self.directory, self.rows(), time.perf_counter() - self._start), file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.writes:
            self._progress.close()
            self._trackers.close()
        remove_handlers(self._handlers)
