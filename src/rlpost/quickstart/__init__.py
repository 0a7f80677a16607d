"""`rlpost quickstart`: what feedback is worth, shown in two minutes on a CPU.

A tiny model is warm-started by SFT, then trained twice from there with the same number of generations: by SDPO, whose
teacher reads what was said of a wrong answer, and by GRPO, which has the (almost always zero) reward alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlpost.failures import PhaseError, report
from rlpost.observe.metrics import read_metrics
from rlpost.quickstart import task

SCORE = "eval/held_out/mean@1"
RUNS = ("sft", "sdpo", "grpo")


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(prog="rlpost quickstart", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the model, the hidden rule, the rows and the sampling")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="where the runs go")
    given = parser.parse_args(arguments)
    folder = given.dir / f"quickstart_seed{given.seed}"
    if (folder / "sdpo").exists():
        print(f"{folder} holds an earlier quickstart: remove it, or choose another --seed or --dir", file=sys.stderr)
        return 2
    task.write(folder, given.seed)
    seconds: dict[str, float] = {}
    for name in RUNS:
        try:
            took = run(name, folder, given.seed)
        except PhaseError as error:
            report(error, folder / name)
            return 1
        if took is None:
            return 130
        seconds[name] = took
    picture = plot(folder)
    print(table(folder, seconds))
    print(f"\npicture: {picture}\nmodel:   {folder / 'sdpo' / 'export'}\nsamples: {folder / 'sdpo' / 'rollouts'}")
    return 0


def run(name: str, folder: Path, seed: int) -> float | None:
    """One recipe to its end; the seconds it took, None where somebody stopped it."""
    from rlpost.trainer import Trainer

    start = time.perf_counter()
    print(f"\n{name}: recipe quickstart_{name}", file=sys.stderr, flush=True)
    trainer = Trainer.from_recipe(f"quickstart_{name}", [f"run.dir={folder}", f"run.seed={seed}"])
    trainer.fit()
    trainer.close()
    return None if trainer.stopped else time.perf_counter() - start


def scores(folder: Path, name: str) -> list[tuple[int, float]]:
    """(steps done, held-out reward) of a run."""
    return [(row["step"], row[SCORE]) for row in read_metrics(folder / name) if SCORE in row]


def table(folder: Path, seconds: dict[str, float]) -> str:
    before = scores(folder, "sdpo")[0][1]
    rows = [("warm start (SFT)", before, seconds["sft"])]
    rows += [(name.upper(), scores(folder, name)[-1][1], seconds[name]) for name in ("sdpo", "grpo")]
    lines = [f"\n{'':18s} {'held-out reward':>16s} {'seconds':>8s}"]
    return "\n".join([*lines, *(f"{label:18s} {score:16.3f} {took:8.0f}" for label, score, took in rows)])


def plot(folder: Path) -> Path:
    """Held-out reward over steps, SDPO against GRPO."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for name, color in (("sdpo", "#2563a8"), ("grpo", "#d1662b")):
        steps, values = zip(*scores(folder, name))
        axes.plot(steps, values, marker="o", markersize=4, color=color, label=name.upper())
    axes.set(xlabel="steps", ylabel="held-out reward", ylim=(-0.03, 1.03), title="The same generations, with and "
             "without what was said of wrong answers")  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e7ec")
    axes.legend(frameon=False)
    path = folder / "quickstart.png"
    figure.savefig(path)
    return path
