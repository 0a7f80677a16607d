"""The same run twice in one process: residents stay, then they move between phases, as on a GPU. argv: a folder, then
the run's overrides. Leaves <folder>/{stay,move}/run.

The moves are real (storages are emptied and filled again); only the other memory is the same as the first.
"""

import sys
from pathlib import Path

import torch

from rlpost import Trainer, assemble, residents
from rlpost.config.compose import load_config


def train(folder: Path, overrides: list[str]) -> None:
    trainer = Trainer(load_config(None, [*overrides, f"run.dir={folder}"]))
    trainer.fit()
    trainer.score(["what"], ["this"])
    trainer.generate(["what"], max_tokens=2)
    trainer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]
    train(folder / "stay", overrides)
    # Checkpoints read memory through `numpy`, after which PyTorch refuses to resize it. On a GPU they read a copy.
    numpy = torch.Tensor.numpy
    torch.Tensor.numpy = lambda self, **keywords: numpy(self.clone(), **keywords)
    assemble.this_device = lambda: torch.device("cuda")
    kinds = set()
    move = residents.Moved.offload
    residents.Moved.offload = lambda self: kinds.add(self.what) or move(self)
    train(folder / "move", [*overrides, "optim.offload=true"])
    print("moved: " + ", ".join(sorted(kinds)))
