"""What the ranks of test_checkpoint_layouts.py do.

argv: a command and a directory with the models dense and experts. `save`: train, save, fail, resume, data parallel.
`cut`: train and save under other layouts. `load`: read all of that under the layouts that this number of ranks has.
"""

import errno
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from launch import say
from tiny_policy import cross_entropy, micro_batch

from rlpost.config.schema import ModelConfig, OptimConfig, ParallelConfig
from rlpost.parallel import init_distributed, rank, world_size
from rlpost.policy.megatron import MegatronPolicy
from rlpost.weights import shards
from rlpost.weights.buckets import tensor_digest
from rlpost.weights.checkpoint import CheckpointError, CheckpointStore
from rlpost.weights.snapshots import SnapshotStore

BATCHES = 4  # of a step, over all data-parallel ranks
SAVED = {"plain": ("dense", {}), "tp2_dp2": ("dense", {"tensor": 2}), "ep2_dp4": ("experts", {"expert": 2})}
LOADED = {  # by the number of ranks: (what was saved, the layout that reads it)
    1: [("plain", {}), ("tp2_dp2", {}), ("ep2_dp4", {})],
    2: [("plain", {"tensor": 2}), ("tp2_dp2", {"pipeline": 2}), ("ep2_dp4", {"expert": 2}), ("ep2_dp4", {})],
}
KINDS = ("master", "exp_avg", "exp_avg_sq")
TEACHER = "teacher"


class Run:
    def __init__(self, model: Path, **parallel: int):
        self.policy = MegatronPolicy(
            ModelConfig(path=str(model)), OptimConfig(lr=1e-3, eps=1e-4), ParallelConfig(**parallel), total_steps=10
        )
        self.snapshots = SnapshotStore(self.policy.masters, self.policy.sync_from_masters)
        self.snapshots.save(TEACHER)

    def step(self, number: int) -> float:
        """The loss of a step whose batches are the same under every layout."""
        dp = self.policy.mesh.dp
        micros = [micro_batch(10 * number + i, ranks=BATCHES) for i in range(dp.rank, BATCHES, dp.size)]
        metrics = self.policy.train_step(micros, cross_entropy)
        self.snapshots.ema("student", TEACHER, 0.1)
        return metrics["train/loss"]

    def kinds(self) -> dict:
        tensors = {kind: partial(self.policy.optimizer_tensors, kind) for kind in KINDS}
        return tensors | {TEACHER: partial(self.policy.gather_masters, self.snapshots.tensors(TEACHER))}

    def restore(self, checkpoint) -> None:
        for kind in KINDS:
            self.policy.load_optimizer_tensors(kind, checkpoint.tensors(kind, self.policy.hf_shapes()).__getitem__)
        self.policy.load_optimizer_scalars(checkpoint.state["optimizer"])
        self.snapshots.put(TEACHER, self.policy.scatter_masters(checkpoint.tensors(TEACHER).__getitem__))

    def digests(self) -> dict:
        return {kind: {name: tensor_digest(t) for name, t in iterate()} for kind, iterate in self.kinds().items()}


def save(directory: Path) -> None:
    model = directory / "dense"
    run = Run(model)
    for number in range(2):
        run.step(number)
    store = CheckpointStore(directory / "plain", shard_bytes=20_000)
    state = {"optimizer": run.policy.optimizer_scalars()}
    path = store.save(2, run.kinds(), state, {"rank": rank()})
    saved, teacher = run.digests(), run.snapshots.hash(TEACHER)
    disk_full_on_one_rank(store, run)
    disk_full_in_the_background(store, run)
    loss = run.step(2)
    unbroken = run.digests()
    write_expectation(directory, "plain", saved, loss)

    resumed = Run(model)
    checkpoint = store.load("latest")
    assert checkpoint.path == path and checkpoint.rank_state == {"rank": rank()}
    resumed.restore(checkpoint)
    assert resumed.snapshots.hash(TEACHER) == teacher
    assert resumed.step(2) == loss
    assert resumed.digests() == unbroken != saved
    truncated_file(store)
    lone_failure_inside_a_swap(resumed)


@contextmanager
def full_disk_of_rank_1() -> Iterator[None]:
    write = shards._File._write

    def full(self, data):
        if rank() == 1 and self.shard.name.startswith("exp_avg-"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, data)

    shards._File._write = full
    yield
    shards._File._write = write


def disk_full_on_one_rank(store: CheckpointStore, run: Run) -> None:
    with full_disk_of_rank_1():
        try:
            store.save(3, run.kinds(), {})
        except CheckpointError as error:
            say(f"rank {rank()}: {error}")
    assert store.load().step == 2 and store.steps() == [2]
    assert not (store.directory / "step_000003.tmp").exists()


def disk_full_in_the_background(store: CheckpointStore, run: Run) -> None:
    """The trainer's collectives go on while the writers talk through the store; then all ranks fail at one look."""
    looks = 0
    with full_disk_of_rank_1():
        store.save(4, run.kinds(), {}, background=True)
        try:
            while True:
                dist.all_reduce(torch.ones(1))
                store.poll()
                looks += 1
        except CheckpointError as error:
            say(f"rank {rank()}: {error}")
    seen = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    dist.all_gather(seen, torch.tensor([looks]))
    assert len(set(map(int, seen))) == 1, seen
    assert store.load().step == 2 and not (store.directory / "step_000004.tmp").exists()
    state = store.load().state
    store.save(2, run.kinds(), state, {"rank": rank()}, background=True)
    store.finish()


def truncated_file(store: CheckpointStore) -> None:
    """Only the rank that sums a file sees that a bit is wrong; all refuse it."""
    if rank() == 0:
        file = store.directory / "step_000002" / "master-00000.safetensors"
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    dist.barrier()
    try:
        store.load()
    except CheckpointError as error:
        say(f"rank {rank()}: {error}")
    dist.barrier()
    if rank() == 0:
        file.write_bytes(whole)
    dist.barrier()


def lone_failure_inside_a_swap(run: Run) -> None:
    """Rank 1 must come out of the swap while rank 0 is still inside and joins no collective."""
    before = run.snapshots.hash("student")
    store = dist.distributed_c10d._get_default_store()
    try:
        with run.snapshots.swap(TEACHER):
            assert run.snapshots.hash(TEACHER) != before
            if rank() == 0:
                store.wait(["rank 1 is out"], timedelta(seconds=20))
            raise ZeroDivisionError
    except ZeroDivisionError:
        store.set(f"rank {rank()} is out", "")
    assert run.snapshots.hash("student") == before
    with run.snapshots.swap(TEACHER):  # a retry
        pass
    assert run.snapshots.hash("student") == before
    say(f"rank {rank()} done")


def write_expectation(directory: Path, name: str, digests: dict, loss: float) -> None:
    if rank() == 0:
        (directory / f"{name}.json").write_text(json.dumps({"digests": digests, "loss": loss}))


def cut(directory: Path) -> None:
    for name in ("tp2_dp2", "ep2_dp4"):
        model, parallel = SAVED[name]
        run = Run(directory / model, **parallel)
        for number in range(2):
            run.step(number)
        state = {"optimizer": run.policy.optimizer_scalars()}
        CheckpointStore(directory / name, shard_bytes=20_000).save(2, run.kinds(), state, background=True)
        digests = run.digests()
        write_expectation(directory, name, digests, run.step(2))
        say(f"rank {rank()} saved {name}")


def load(directory: Path) -> None:
    for name, parallel in LOADED[world_size()]:
        expected = json.loads((directory / f"{name}.json").read_text())
        run = Run(directory / SAVED[name][0], **parallel)
        run.restore(CheckpointStore(directory / name).load())
        assert run.digests() == expected["digests"], (name, parallel)
        loss = run.step(2)
        assert math.isclose(loss, expected["loss"], rel_tol=1e-5), (name, parallel, loss, expected["loss"])
        say(f"rank {rank()} of {world_size()} loaded {name}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    init_distributed(timeout_s=60)
    {"save": save, "cut": cut, "load": load}[sys.argv[1]](Path(sys.argv[2]))
    dist.destroy_process_group()
