"""Publishing into an engine on the same GPU: seconds, where they go, sleep and wake, memory over many publishes.

    PYTHONPATH=src python benchmarks/publish.py --shape qwen3-0.6b [--policy megatron] [--parts repeat breakdown]
    PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/publish.py --shape qwen3-8b --tensor-parallel 2

The weights are random and begin on the device; `--policy megatron` trains them (and needs the space of an optimizer).
The floor is one copy of the same bytes on the device, measured in the same run. Exits with 1 where a part failed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_setup import (
    DTYPE,
    GIB,
    Stopwatch,
    Table,
    add_engine_options,
    free_bytes,
    hardware,
    say,
    seconds_of,
    spread,
    start_engine,
    synchronize,
)
from models import RandomWeights, model_config, write_model

import rlpost.weights.publish as publishing
from rlpost.config.schema import ModelConfig, OptimConfig, ParallelConfig
from rlpost.parallel import device, init_distributed
from rlpost.rollout.engine import TAGS, Engine
from rlpost.weights.publish import Publisher

GOALS_MS = {"qwen3-0.6b": 20, "qwen3-8b": 150}
MANY = 50
PARTS = ("floor", "repeat", "breakdown", "sleep", "many", "verify", "host")


def make_policy(given: argparse.Namespace, path: str) -> Any:
    if given.policy == "random":
        return RandomWeights(path, device(), dtype=DTYPE)
    from rlpost.policy.megatron import MegatronPolicy

    model = ModelConfig(path, dtype="bf16" if torch.cuda.is_available() else "fp32")
    return MegatronPolicy(model, OptimConfig(lr=1e-6), ParallelConfig(tensor=given.tensor_parallel))


class Bench:
    def __init__(self, given: argparse.Namespace, policy: Any, engine: Engine, bytes_: int):
        self.given, self.policy, self.engine, self.bytes = given, policy, engine, bytes_
        self.publisher = Publisher(policy, engine, bucket_bytes=given.bucket_mib * 2**20)
        self.table = Table("what", "ms: median (range)", "")

    def publish(self) -> float:
        synchronize()
        return self.publisher.publish()["publish/seconds"]

    def add(self, what: str, *seconds: float) -> None:
        self.table.add(what, spread(list(seconds)), f"{self.bytes / sorted(seconds)[len(seconds) // 2] / 1e9:.0f} GB/s")

    def floor(self) -> None:
        """One copy of the bytes, in pieces of a bucket."""
        piece = min(self.given.bucket_mib * 2**20, self.bytes)
        source, target = (torch.empty(piece, dtype=torch.uint8, device=device()) for _ in range(2))

        def copy() -> None:
            for _ in range(self.bytes // piece):
                target.copy_(source)
            target[: self.bytes % piece].copy_(source[: self.bytes % piece])

        self.add("floor: one copy on the device", *[seconds_of(copy) for _ in range(10)])

    def first(self) -> None:
        self.add("first publish (names compared, NaN proof)", self.publish())

    def repeat(self) -> None:
        self.publish()
        self.add("publish", *[self.publish() for _ in range(self.given.repeats)])
        if goal := GOALS_MS.get(self.given.shape):
            self.table.add("goal", f"{goal}.0")

    def breakdown(self, times: int = 5) -> None:
        watch, engine, policy = Stopwatch(), self.engine, self.policy
        watch.wrap_iterator(policy, "hf_tensors", "the policy's tensors (gather, cast)")
        watch.wrap_iterator(publishing, "iter_buckets", "launch the copies into buckets")
        watch.wrap(engine, "pause", "pause")
        if self.given.engine == "sglang":
            watch.wrap(engine, "_share", "finish the copies, IPC handle")
            watch.wrap(engine, "_finish_loading", "wait for the bucket that the engine loads")
            watch.wrap(engine, "_load", "send the next")
        watch.wrap(engine, "load_bucket", "load_bucket, the rest (checks)")
        watch.wrap(engine, "flush", "flush")
        watch.wrap(engine, "commit", "commit")
        watch.wrap(self.publisher, "_together", "agreement and the rest")
        try:
            for _ in range(times):
                self.publish()
        finally:
            watch.unwrap()
        for label, seconds in watch.seconds.items():
            self.table.add(f"· {label}", f"{1e3 * seconds / times:.2f}")
        if self.given.engine == "sglang":
            hooks = [seconds_of(lambda: engine._on_leader(engine._hook, "nothing")) for _ in range(20)]
            flushes = [seconds_of(lambda: engine._on_leader(engine._call, "flush")) for _ in range(20)]
            self.table.add("· for comparison: an empty command in the engine", spread(hooks, 2))
            self.table.add("· for comparison: dropping an empty prefix cache", spread(flushes, 2))

    def sleep(self) -> None:
        engine = self.engine
        for tag in TAGS:
            before = free_bytes()
            seconds = seconds_of(lambda tag=tag: engine.sleep([tag]))
            self.table.add(f"sleep {tag}", spread([seconds]), f"{(free_bytes() - before) / GIB:.2f} GiB given back")
        for tag in TAGS:
            before = free_bytes()
            seconds = seconds_of(lambda tag=tag: engine.wake([tag]))
            self.table.add(f"wake {tag}", spread([seconds]), f"{(before - free_bytes()) / GIB:.2f} GiB taken")
        self.publish()

        def wake() -> None:
            engine.wake(["weights"])
            self.publisher.publish()
            engine.wake(["kv_cache", "cuda_graph"])

        rounds = [(seconds_of(lambda: engine.sleep(TAGS)), seconds_of(wake)) for _ in range(5)]
        self.table.add("sleep, everything", spread([asleep for asleep, _ in rounds]))
        self.table.add("wake and publish", spread([awake for _, awake in rounds]))

    def many(self) -> None:
        before, seconds = self.memory(), []
        for _ in range(MANY):
            seconds.append(self.publish())
        after = self.memory()
        self.add(f"{MANY} publishes", *seconds)
        for name in before:
            change = f"{1024 * (after[name] - before[name]):+.0f} MiB"
            self.table.add(f"· {name}", f"{before[name]:.2f} → {after[name]:.2f} GiB", change)

    def memory(self) -> dict[str, float]:
        """GiB: of the device in use, and resident in host memory."""
        import psutil

        synchronize()
        found = {"own host memory": psutil.Process().memory_info().rss / GIB}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            found["device memory in use"] = (total - free) / GIB
        if self.given.engine == "sglang" and self.engine._process is not None:
            host = psutil.Process(self.engine._process.pid)
            processes = [host, *host.children(recursive=True)]
            found["the engine's host memory"] = sum(p.memory_info().rss for p in processes) / GIB
        return found

    def verify(self) -> None:
        self.publisher.verify = "always"
        try:
            self.add("publish with verify", self.publish())
        finally:
            self.publisher.verify = "off"

    def host(self) -> None:
        if self.given.engine != "sglang":
            return
        kept, self.engine.transport = self.engine.transport, "host"
        try:
            self.add("publish through host memory", self.publish())
        finally:
            self.engine.transport = kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, memory_fraction=0.3)
    parser.add_argument("--policy", choices=["random", "megatron"], default="random", help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="(default: all)")
    given = parser.parse_args()
    init_distributed()
    folder = [tempfile.mkdtemp(prefix="publish-")]
    dist.broadcast_object_list(folder)
    path = Path(folder[0])
    config = model_config(given.shape, given.layers)
    if dist.get_rank() == 0:
        if given.policy == "megatron":
            write_model(path, config, device())
        else:
            config.save_pretrained(path)
    dist.barrier()
    ranks = dist.get_world_size()
    say(f"{ranks} × {hardware()}, {given.shape}, {given.policy} weights, {given.bucket_mib} MiB a bucket")
    policy = make_policy(given, str(path))
    engine = start_engine(given, str(path))
    try:
        bytes_ = sum(tensor.nbytes for _, tensor in policy.hf_tensors(DTYPE))
        say(f"{bytes_ / 1e9:.2f} GB of weights, engine transport {getattr(engine, 'transport', 'in this process')}")
        bench = Bench(given, policy, engine, bytes_)
        bench.first()
        for part in given.parts:
            bench.table.part(part, getattr(bench, part))
    finally:
        engine.close()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
    bench.table.show()
    return int(bench.table.failed)


if __name__ == "__main__":
    sys.exit(main())
