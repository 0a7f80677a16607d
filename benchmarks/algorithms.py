"""Does every algorithm learn? Each tiny recipe from the same warm start, over seeds: a table and a picture.

PYTHONPATH=src python benchmarks/algorithms.py [--seeds 3] [--dir runs/algorithms] [--only tiny_grpo tiny_opd]

The runs go on where they were left; the picture is DIR/algorithms.png. Exits with 1 where some held-out reward did not
rise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rlpost import Trainer
from rlpost.observe.metrics import read_metrics
from rlpost.quickstart import SCORE, task

# The teachers of tiny_opd and tiny_mopd are what tiny_grpo and tiny_rloo leave, so these come first.
RECIPES = (
    *("tiny_grpo", "tiny_dr_grpo", "tiny_dapo", "tiny_gspo", "tiny_cispo", "tiny_sapo", "tiny_rloo"),
    *("tiny_reinforce", "tiny_reinforce_pp", "tiny_ppo", "quickstart_sdpo", "tiny_trust_region", "tiny_periodic"),
    *("tiny_blend", "tiny_opsd", "tiny_opd", "tiny_opd_advantage", "tiny_mopd"),
)


def run(recipe: str, folder: Path, seed: int) -> Path:
    """The directory of the recipe's run, which is made unless it is there already."""
    directory = folder / ("sft" if recipe == "quickstart_sft" else recipe)
    if not (directory / "export").exists():
        options = [f"run.dir={folder}", f"run.seed={seed}", "trainer.plots=false", "tracker.tensorboard=false"]
        # The warm start is named `sft`, as the other recipes expect it.
        trainer = Trainer.from_recipe(recipe, options + ([] if recipe == "quickstart_sft" else [f"run.name={recipe}"]))
        trainer.fit()
        trainer.close()
    return directory


def curves(recipe: str, folders: Sequence[Path]) -> list[list[tuple[int, float]]]:
    """For each seed, (steps done, held-out reward)."""
    return [[(row["step"], row[SCORE]) for row in read_metrics(f / recipe) if SCORE in row] for f in folders]


def line(recipe: str, folders: Sequence[Path]) -> str:
    """A row of the table in Markdown."""
    seeds = curves(recipe, folders)
    before, after = (", ".join(f"{curve[end][1]:.2f}" for curve in seeds) for end in (0, -1))
    rows = [row for folder in folders for row in read_metrics(folder / recipe)]
    seconds = median(row["perf/step_s"] for row in rows if "perf/step_s" in row)
    return f"| `{recipe}` | {before} | {after} | {seconds:.2f} |"


def plot(recipes: Sequence[str], folders: Sequence[Path], path: Path) -> None:
    """Held-out reward over steps: a panel for each recipe, a line for each seed."""
    from matplotlib.figure import Figure

    columns = 6
    figure = Figure(figsize=(12, 1.9 * -(-len(recipes) // columns)), dpi=120, layout="constrained")
    grid = figure.subplots(-(-len(recipes) // columns), columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, recipe in zip(grid, recipes):
        for seed, (curve, color) in enumerate(zip(curves(recipe, folders), ("#2563a8", "#d1662b", "#3f8f4f"))):
            axes.plot(*zip(*curve), marker="o", markersize=3, linewidth=1.2, color=color, label=f"seed {seed}")
        axes.set_title(recipe, fontsize=9)
        axes.set(ylim=(-0.03, 1.05))
        axes.grid(color="#e4e7ec")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(recipes) :]:
        axes.set_axis_off()
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    figure.supxlabel("steps", fontsize=9)
    figure.supylabel("held-out reward", fontsize=9)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--only", nargs="*", default=RECIPES)
    given = parser.parse_args()
    folders = [given.dir / f"seed{seed}" for seed in range(given.seeds)]
    for seed, folder in enumerate(folders):
        if not (folder / "sft" / "export").exists():
            task.write(folder, seed)
            run("quickstart_sft", folder, seed)
        for recipe in given.only:
            run(recipe, folder, seed)
    print("| recipe | held-out reward before | after | s per step |\n| --- | --- | --- | ---: |")
    print("\n".join(line(recipe, folders) for recipe in given.only))
    plot(given.only, folders, given.dir / "algorithms.png")
    worse = [r for r in given.only if any(curve[-1][1] <= curve[0][1] for curve in curves(r, folders))]
    if worse:
        print(f"did not improve in every seed: {', '.join(worse)}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
