"""plots/*.png from metrics.jsonl alone: reward, loss, teacher distance, response lengths, and all on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpost.observe.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#2563a8", "#d1662b", "#3a8f55", "#8a5aa8", "#a8324b", "#5f6b7a")
INK, GRID = "#333a44", "#e4e7ec"
FEW = 12  # values that are shown as they are


@dataclass(frozen=True)
class Chart:
    """What one picture shows: metrics with their labels, and evaluations as points."""

    title: str
    ylabel: str
    metrics: Mapping[str, str]
    evals: str | None = None  # how the names of those begin after "eval/<set>/"
    from_zero: bool = True


CHARTS = {
    "reward": Chart("Reward", "mean reward", {"rollout/reward/mean": "training rollouts"}, evals="mean@"),
    "loss": Chart("Loss", "loss", {"train/loss": "loss"}, from_zero=False),
    "teacher_distance": Chart(
        "Distance to the teacher", "‖student − teacher‖ / ‖student‖", {"ema/distance": "distance"}
    ),
    "critic": Chart("Critic", "explained variance", {"critic/explained_variance": "of the returns"}, from_zero=False),
    "response_lengths": Chart(
        "Response length",
        "tokens",
        {"rollout/response_tokens/mean": "mean", "rollout/response_tokens/max": "longest"},
    ),
}


def plot_run(run_dir: str | Path, *, save: bool = True) -> Figure:
    """Draw the run so far; with `save` also as `plots/<chart>.png` and `plots/overview.png`.

    Charts that the run has no numbers for are left out. Returns the overview, which a notebook shows.
    """
    run_dir = Path(run_dir)
    rows = read_metrics(run_dir)
    present = {name: chart for name, chart in CHARTS.items() if _series(rows, chart) or _evals(rows, chart)}
    overview = _overview(present, rows, run_dir.name)
    if save:
        directory = run_dir / "plots"
        directory.mkdir(exist_ok=True)
        for name, chart in present.items():
            figure = _figure(7, 4)
            _draw(figure.add_subplot(), chart, rows)
            figure.savefig(directory / f"{name}.png")
        overview.savefig(directory / "overview.png")
    return overview


def smooth(values: Sequence[float]) -> np.ndarray:
    """Gaussian mean over the neighbours on both sides (a running mean would lag behind the curve); at least FEW values.

    Its width grows with the run: a fortieth of it to each side.
    """
    sigma = max(1.5, len(values) / 40)
    reach = np.arange(-int(3 * sigma), int(3 * sigma) + 1)
    kernel = np.exp(-0.5 * (reach / sigma) ** 2)
    weights = np.convolve(np.ones(len(values)), kernel, "same")  # fewer neighbours at the ends
    return np.convolve(values, kernel, "same") / weights


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    class RunFigure(Figure):
        """Shows itself in a notebook without pyplot, whose global state and backend stay the user's."""

        def _repr_png_(self) -> bytes:
            from io import BytesIO

            image = BytesIO()
            self.savefig(image, format="png")
            return image.getvalue()

    return RunFigure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")


def _overview(charts: Mapping[str, Chart], rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    columns = 1 if len(charts) == 1 else 2
    lines = max(1, -(-len(charts) // columns))
    figure = _figure(5.5 * columns, 3.4 * lines + 0.4)
    figure.suptitle(title if charts else f"{title}: nothing to draw yet", color=INK, fontsize=13, fontweight="bold")
    for i, chart in enumerate(charts.values(), 1):
        _draw(figure.add_subplot(lines, columns, i), chart, rows)
    return figure


def _draw(axes: Axes, chart: Chart, rows: Sequence[Mapping[str, Any]]) -> None:
    colors = iter(COLORS * 4)
    lowest = 0.0
    for label, steps, values in _series(rows, chart):
        color = next(colors)
        lowest = min(lowest, *values)
        if len(values) < FEW:
            axes.plot(steps, values, color=color, lw=1.6, marker=".", label=label)
        else:
            axes.plot(steps, values, color=color, lw=0.8, alpha=0.35)
            axes.plot(steps, smooth(values), color=color, lw=2, label=f"{label} (smoothed)")
    for label, steps, values in _evals(rows, chart):
        lowest = min(lowest, *values)
        axes.plot(steps, values, color=next(colors), lw=1, ls=(0, (4, 3)), marker="o", ms=5, label=label)
    _style(axes, chart, lowest)


def _style(axes: Axes, chart: Chart, lowest: float) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(chart.title, loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel(chart.ylabel, color=INK)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8bfc9")
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.ticklabel_format(axis="y", scilimits=(-3, 4), useMathText=True)
    if chart.from_zero and lowest >= 0:
        axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)


def _series(rows: Sequence[Mapping[str, Any]], chart: Chart) -> list[tuple[str, list[int], list[float]]]:
    found = [(label, *_points(rows, name)) for name, label in chart.metrics.items()]
    return [series for series in found if series[1]]


def _evals(rows: Sequence[Mapping[str, Any]], chart: Chart) -> list[tuple[str, list[int], list[float]]]:
    if chart.evals is None:
        return []
    names = sorted({name for row in rows for name in row if name.startswith("eval/")})
    chosen = [name for name in names if name.rpartition("/")[2].startswith(chart.evals)]
    return [(name.replace("eval/", "eval: ", 1), *_points(rows, name)) for name in chosen]


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """A value that was not finite (null) is left out."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]
