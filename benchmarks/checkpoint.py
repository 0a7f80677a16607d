"""Saving and loading a checkpoint against writing and reading the same bytes with safetensors and torch.save.

    MODEL_DIR=…/SmolLM2-135M-Instruct python benchmarks/checkpoint.py [--dir DIR] [--repeats 3]

One process. The state is that of an SDPO run: fp32 masters, Adam's two moments, the teacher's EMA. Every writer makes
its files durable (fsync), in turn and on the same disk. `pause` is what the training loop waits for; reading finds the
files in the page cache. Prints medians and ratios to the floor, the faster of the two libraries.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlpost.config.schema import ModelConfig, OptimConfig, ParallelConfig
from rlpost.parallel import init_distributed
from rlpost.persist import MOMENTS
from rlpost.policy.megatron import MegatronPolicy
from rlpost.weights.checkpoint import CheckpointStore
from rlpost.weights.snapshots import SnapshotStore

TEACHER = "teacher"
Row = tuple[str, float]


class State:
    """What a run of SDPO keeps, and how `persist.py` saves and restores it."""

    def __init__(self, model: str):
        self.policy = MegatronPolicy(ModelConfig(path=model), OptimConfig(), ParallelConfig())
        self.snapshots = SnapshotStore(self.policy.masters, self.policy.sync_from_masters)
        self.snapshots.save(TEACHER)
        self.shapes = self.policy.hf_shapes()

    def kinds(self) -> dict[str, Callable[[], Iterator[tuple[str, Tensor]]]]:
        kinds = {kind: partial(self.policy.optimizer_tensors, kind) for kind in MOMENTS}
        return kinds | {f"tag.{TEACHER}": partial(self.policy.gather_masters, self.snapshots.tensors(TEACHER))}

    def flat(self) -> dict[str, Tensor]:
        return {f"{kind}/{name}": tensor for kind, tensors in self.kinds().items() for name, tensor in tensors()}

    def restore(self, store: CheckpointStore, *, verify: bool) -> None:
        checkpoint = store.load("latest", verify=verify)
        for kind in MOMENTS:
            self.policy.load_optimizer_tensors(kind, checkpoint.tensors(kind, self.shapes).__getitem__)
        teacher = checkpoint.tensors(f"tag.{TEACHER}", self.shapes)
        self.snapshots.put(TEACHER, self.policy.scatter_masters(teacher.__getitem__))

    def copy_from(self, tensors: dict[str, Tensor]) -> None:
        """What any loader has to do in the end."""
        for name, live in self.flat().items():
            live.copy_(tensors[name])


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def durable(write: Callable[[Path], object], path: Path) -> None:
    path.unlink(missing_ok=True)
    write(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def measure(state: State, store: CheckpointStore, folder: Path) -> Iterator[Row]:
    """One round of everything, in turn."""
    tensors = state.flat()
    yield "save: safetensors", seconds(lambda: durable(partial(save_file, tensors), folder / "x.safetensors"))
    yield "save: torch.save", seconds(lambda: durable(partial(torch.save, tensors), folder / "x.pt"))
    shutil.rmtree(store.directory, ignore_errors=True)
    yield "save: rlpost", seconds(lambda: store.save(1, state.kinds(), {}))
    shutil.rmtree(store.directory)
    yield "pause: rlpost, async_save", (pause := seconds(lambda: store.save(1, state.kinds(), {}, background=True)))
    yield "save: rlpost, async_save", pause + seconds(store.finish)
    yield "load: safetensors", seconds(lambda: state.copy_from(load_file(folder / "x.safetensors")))
    yield "load: torch.load", seconds(lambda: state.copy_from(torch.load(folder / "x.pt", weights_only=True)))
    yield "load: rlpost, checksums read", seconds(lambda: state.restore(store, verify=True))
    yield "load: rlpost, not read", seconds(lambda: state.restore(store, verify=False))


def table(rounds: list[dict[str, float]], size: int) -> str:
    medians = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    floors = {
        "save": min(medians["save: safetensors"], medians["save: torch.save"]),
        "load": min(medians["load: safetensors"], medians["load: torch.load"]),
    }
    lines = ["| | median s | range | GB/s | × floor |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, took in medians.items():
        floor = floors["load" if name.startswith("load") else "save"]
        values = [found[name] for found in rounds]
        span = f"{min(values):.2f}–{max(values):.2f}"
        lines.append(f"| {name} | {took:.2f} | {span} | {size / took / 1e9:.2f} | {took / floor:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=os.environ.get("MODEL_DIR"), help="a Hugging Face directory (MODEL_DIR)")
    parser.add_argument("--dir", type=Path, help="the disk to measure (default: the temporary directory)")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    if given.model is None:
        parser.error("give --model, or export MODEL_DIR")
    init_distributed()
    state = State(given.model)
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        store = CheckpointStore(Path(folder) / "checkpoints", keep=1)
        rounds = [dict(measure(state, store, Path(folder))) for _ in range(given.repeats + 1)][
            1:
        ]  # the first is warm-up
        on_disk = {
            "safetensors": (Path(folder) / "x.safetensors").stat().st_size,
            "torch.save": (Path(folder) / "x.pt").stat().st_size,
            "rlpost": sum(f.stat().st_size for f in (store.directory / "step_000001").iterdir()),
        }
    size = sum(tensor.nbytes for tensor in state.flat().values())
    print(f"{size / 1e9:.3f} GB of tensors; on disk: " + ", ".join(f"{n} {b / 1e9:.3f}" for n, b in on_disk.items()))
    print(table(rounds, size))


if __name__ == "__main__":
    main()
