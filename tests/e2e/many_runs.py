"""Several runs in one process (on each rank). argv: a folder, then a JSON file {name: overrides}.

Each leaves <folder>/<name>/run. A name with a slash, as in `halves/4`, goes on with the run of `halves`.
"""

import json
import sys
from pathlib import Path

import torch

from rlpost import Trainer
from rlpost.config.compose import load_config

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, runs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    for name, overrides in runs.items():
        trainer = Trainer(load_config(None, [*overrides, f"run.dir={folder / name.split('/')[0]}"]))
        trainer.fit()
        trainer.close()
