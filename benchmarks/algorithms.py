"""Does every algorithm learn? Each tiny recipe from the same warm start, over seeds: a table of held-out rewards.

PYTHONPATH=src python benchmarks/algorithms.py [--seeds 3] [--dir runs/algorithms] [--only tiny_grpo tiny_opd]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rlpost import Trainer
from rlpost.observe.metrics import read_metrics
from rlpost.quickstart import SCORE, task

# tiny_opd's teacher is what tiny_grpo leaves, so that one comes first.
RECIPES = (
    *("tiny_grpo", "tiny_dr_grpo", "tiny_dapo", "tiny_gspo", "tiny_cispo", "tiny_sapo", "tiny_rloo"),
    *("tiny_reinforce", "tiny_reinforce_pp", "tiny_ppo", "quickstart_sdpo", "tiny_trust_region", "tiny_periodic"),
    *("tiny_blend", "tiny_opsd", "tiny_opd", "tiny_opd_advantage"),
)


def run(recipe: str, folder: Path, seed: int) -> Path:
    """The directory of the recipe's run, which is made unless it is there already."""
    directory = folder / recipe
    if not (directory / "export").exists():
        options = [f"run.dir={folder}", f"run.seed={seed}", "trainer.plots=false", "tracker.tensorboard=false"]
        # The warm start is named `sft`, as the other recipes expect it.
        trainer = Trainer.from_recipe(recipe, options + ([] if recipe == "quickstart_sft" else [f"run.name={recipe}"]))
        trainer.fit()
        trainer.close()
    return directory


def row(recipe: str, folders: Sequence[Path]) -> str:
    before, after, seconds = [], [], []
    for folder in folders:
        rows = read_metrics(folder / recipe)
        scores = [r[SCORE] for r in rows if SCORE in r]
        before.append(scores[0])
        after.append(scores[-1])
        seconds += [r["perf/step_s"] for r in rows if "perf/step_s" in r]
    shown = ["  ".join(f"{score:5.3f}" for score in scores) for scores in (before, after)]
    return f"{recipe:20s} {shown[0]}  →  {shown[1]}   {median(seconds):6.3f} s/step"


def main() -> None:
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
    print("\n".join(row(recipe, folders) for recipe in given.only))


if __name__ == "__main__":
    main()
