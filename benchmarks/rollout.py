"""Rollout inside the loop against the bare engine: tokens per second of the same prompts and lengths, turn by turn.

    PYTHONPATH=src python benchmarks/rollout.py --shape qwen3-0.6b --tokenizer …/SmolLM2-135M-Instruct [--bare separate]

The loop is `Sampler.sample`: requests, the engine's answers, versions, decoded text. The bare engine is, with
`--bare same`, SGLang's answers as they leave the pipe of the same engine, before rlpost makes anything of them (a start
is saved, but the pipe counts for both); with `--bare separate`, `sglang.Engine.generate` in a process of its own with
the same arguments, both engines on the GPU, taking turns. Every turn has new prompts and an empty prefix cache; lengths
are fixed by ignoring end tokens. The first turn of each is warm-up. Weights are random.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from bare_sglang import BareEngine
from engine_setup import DTYPE, Stopwatch, Table, add_engine_options, hardware, say, seconds_of, spread, start_engine
from models import RandomWeights, model_config
from transformers import AutoTokenizer

import rlpost.rollout.sampler as sampling
from rlpost.config.schema import RolloutConfig
from rlpost.parallel import device, init_distributed
from rlpost.rollout.engine import Engine, Request, SamplingParams
from rlpost.rollout.engines.sglang_arguments import engine_arguments, sampling_params
from rlpost.rollout.sampler import Sampler
from rlpost.types import Prompt
from rlpost.weights.publish import Publisher

GOAL = 0.97
WORKLOADS = ("256x1x128x256", "32x8x128x512")  # prompts × samples × prompt tokens × response tokens


class Workload:
    def __init__(self, text: str, vocabulary: int):
        self.text, self.vocabulary = text, vocabulary
        self.prompts, self.samples, self.given, self.made = (int(part) for part in text.split("x"))
        self.params = SamplingParams(self.made, ignore_eos=True)

    @property
    def tokens(self) -> int:
        return self.prompts * self.samples * self.made

    def turn(self, number: int) -> list[Prompt]:
        draw = random.Random(f"{self.text} {number}")
        rows = [[draw.randrange(3, self.vocabulary) for _ in range(self.given)] for _ in range(self.prompts)]
        return [Prompt(i, [], ids) for i, ids in enumerate(rows)]


class Bench:
    def __init__(self, given: argparse.Namespace, engine: Engine, bare: BareEngine | None):
        self.given, self.engine, self.separate = given, engine, bare
        self.tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
        self.sampler = Sampler(engine, self.tokenizer, RolloutConfig(), seed=0)
        self.table = Table("prompts × samples × in × out", "bare tok/s", "in the loop tok/s", f"ratio (goal {GOAL})")

    def loop(self, workload: Workload, prompts: list[Prompt], turn: int) -> float:
        made = []

        def sample() -> None:
            made.extend(self.sampler.sample(prompts, turn, n=workload.samples, params=workload.params))

        seconds = seconds_of(sample)
        tokens = sum(len(sample.response_ids) for sample in made)
        if tokens != workload.tokens or {sample.version for sample in made} != {self.engine.version}:
            raise RuntimeError(f"{tokens} tokens of versions {sorted({s.version for s in made})}")
        return seconds

    def bare(self, workload: Workload, prompts: list[Prompt], turn: int) -> float:
        ids = [prompt.ids for prompt in prompts for _ in range(workload.samples)]
        params = [sampling_params(workload.params, None)] * len(ids)
        if self.separate is not None:
            answer = self.separate.generate(ids, params)
            seconds, tokens = answer["seconds"], answer["tokens"]
        else:
            counts = []
            seconds = seconds_of(lambda: counts.append(self.same(ids, params, workload.params)))
            [tokens] = counts
        if tokens != workload.tokens:
            raise RuntimeError(f"the bare engine made {tokens} tokens, not {workload.tokens}")
        return seconds

    def same(self, ids: list[list[int]], params: list[dict], ours: SamplingParams) -> int:
        engine = self.engine
        if self.given.engine == "torch":
            return sum(len(c.ids) for c in engine.generate([Request(row, ours, i) for i, row in enumerate(ids)]))

        def call() -> int:
            return sum(
                len(made) for made, *_ in engine._process.call("generate", input_ids=ids, sampling_params=params)
            )

        return engine._on_leader(call)

    def drop_prefixes(self) -> None:
        if self.given.engine == "sglang":
            self.engine._on_leader(self.engine._call, "flush")

    def measure(self, workload: Workload) -> None:
        taken: dict[Callable, list[float]] = {self.bare: [], self.loop: []}
        for turn in range(self.given.turns + 1):
            prompts = workload.turn(turn)
            for which in [self.bare, self.loop][:: 1 if turn % 2 else -1]:
                self.drop_prefixes()
                taken[which].append(which(workload, prompts, turn))
            say(f"  turn {turn}: bare {taken[self.bare][-1]:.3f} s, in the loop {taken[self.loop][-1]:.3f} s")
        bare, loop = taken[self.bare][1:], taken[self.loop][1:]
        self.table.add(
            workload.text.replace("x", " × "),
            *(f"{workload.tokens / median(seconds):,.0f}" for seconds in (bare, loop)),
            spread([b / s for b, s in zip(bare, loop)], 3, 1),
        )
        self.breakdown(workload)

    def breakdown(self, workload: Workload) -> None:
        """One more turn with wrapped calls."""
        self.drop_prefixes()
        watch = Stopwatch()
        watch.wrap(self.sampler, "sample", "requests and samples")
        watch.wrap(sampling, "decode_all", "decode")
        watch.wrap(self.engine, "generate", "checks and completions")
        if self.given.engine == "sglang" and self.engine._process is not None:
            watch.wrap(self.engine._process, "call", "the engine")
        try:
            seconds = self.loop(workload, workload.turn(self.given.turns + 1), self.given.turns + 1)
        finally:
            watch.unwrap()
        parts = ", ".join(f"{label} {1e3 * part:.1f} ms" for label, part in watch.seconds.items())
        say(f"  a turn of {1e3 * seconds:.0f} ms in the loop: {parts}")


def start_bare(given: argparse.Namespace, engine: Engine, extra: dict) -> BareEngine:
    """The same arguments; of the memory that the first engine left, as much as that one took."""
    on_gpu = torch.cuda.is_available()
    wanted = engine_arguments(engine, on_gpu)
    wanted["mem_fraction_static"] = given.memory_fraction / (1 - given.memory_fraction)
    graphs = {"disable_cuda_graph": True} if given.no_graphs else {}
    say("the bare engine starts …")
    return BareEngine(wanted, extra | graphs, {} if on_gpu else {"SGLANG_USE_CPU_ENGINE": "1"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, memory_fraction=0.35)
    parser.add_argument("--tokenizer", required=True, help="a directory with a tokenizer")
    parser.add_argument("--bare", choices=["same", "separate"], default="same", help="(default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="after one of warm-up (default: %(default)s)")
    parser.add_argument("--workloads", nargs="*", default=WORKLOADS, help="(default: %(default)s)")
    given = parser.parse_args()
    if given.bare == "separate" and (given.engine != "sglang" or given.tensor_parallel > 1):
        parser.error("--bare separate: with --engine sglang and --tensor-parallel 1 only")
    init_distributed()
    folder = [tempfile.mkdtemp(prefix="rollout-")]
    dist.broadcast_object_list(folder)
    [path] = folder
    config = model_config(given.shape, given.layers)
    if dist.get_rank() == 0:
        config.save_pretrained(path)
    dist.barrier()
    say(f"{dist.get_world_size()} × {hardware()}, {given.shape}, {given.engine} engine, bare: {given.bare}")
    workloads = [Workload(text, config.vocab_size) for text in given.workloads]
    room = max(w.prompts * w.samples * (w.given + w.made) for w in workloads) + 4096
    extra = {"max_total_tokens": room} if given.bare == "separate" else {}  # the same room for both
    engine, bare = start_engine(given, path, extra), None
    try:
        Publisher(RandomWeights(path, device(), dtype=DTYPE), engine).publish()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        bare = start_bare(given, engine, extra) if given.bare == "separate" else None
        bench = Bench(given, engine, bare)
        for workload in workloads:
            bench.table.part(workload.text, lambda workload=workload: bench.measure(workload))
    finally:
        if bare is not None:
            bare.close()
        engine.close()
    bench.table.show()
    return int(bench.table.failed)


if __name__ == "__main__":
    sys.exit(main())
