"""A run of six steps and one of three and three, in one process. argv: a folder, then the run's overrides.

Leaves <folder>/{whole,halves}/run, and beside each the sampled tokens, a line a step. The whole run saves at step 3
too, in the background.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch

from rlpost import Trainer
from rlpost.config.compose import load_config


def train(folder: Path, steps: int, overrides: list[str]) -> None:
    # As in another process: nothing of the random states that a run has left.
    random.seed(steps)
    np.random.seed(steps)
    torch.manual_seed(steps)
    trainer = Trainer(load_config(None, [*overrides, f"run.dir={folder}", f"trainer.steps={steps}"]))
    step_done = trainer.rooms.observer.step_done

    def and_keep_ids(step, samples, *rest):
        if trainer.rooms.agreement.rank == 0:
            rows = [
                [s.group_id, s.index, s.prompt.id, s.prompt.ids, s.response_ids, s.rollout_logprobs] for s in samples
            ]
            with open(folder / "tokens.jsonl", "a") as file:
                file.write(json.dumps([step, rows]) + "\n")
        return step_done(step, samples, *rest)

    trainer.rooms.observer.step_done = and_keep_ids
    folder.mkdir(parents=True, exist_ok=True)
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]
    train(folder / "whole", 6, [*overrides, "trainer.save_every=3", "trainer.async_save=true", "trainer.keep=5"])
    train(folder / "halves", 3, overrides)
    train(folder / "halves", 6, overrides)
