"""Runs under torchrun on two ranks: what `rlpost plan` predicts, beside what real policies hold."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from launch import say
from tiny_models import make_policy

from rlpost.config.schema import ParallelConfig
from rlpost.parallel import check_layout, init_distributed
from rlpost.plan import layout_of, parameters_of_stage, trained_bytes
from rlpost.policy.hf_config import read_config

LAYOUTS = [
    ("llama-tied", {}),
    ("qwen2", {"tensor": 2}),
    ("qwen3", {"tensor": 2}),
    ("llama-tied", {"pipeline": 2}),
    ("qwen3", {"context": 2}),
    ("qwen3-moe", {"expert": 2}),
]


def main(directory: Path) -> None:
    init_distributed()
    for kind, sizes in LAYOUTS:
        policy = make_policy(directory / kind, **sizes)
        held = policy.resident_bytes()
        parallel = ParallelConfig(**sizes)
        layout = layout_of(parallel, check_layout(parallel, dist.get_world_size()))
        parameters = parameters_of_stage(read_config(directory / kind), layout, policy.mesh.pp.rank)
        planned = trained_bytes(parameters, layout, itemsize=4)
        # Which rank has how much of the optimizer depends on buckets; all together they have everything once.
        optimizer = torch.tensor([held["optimizer"], planned["optimizer"]])
        dist.all_reduce(optimizer)
        for name in ("weights", "gradients"):
            assert held[name] == planned[name], (kind, sizes, name, held, planned)
        slack = int(optimizer[1] - optimizer[0])  # a planned share is rounded up
        assert 0 <= slack <= 16 * dist.get_world_size(), (kind, sizes, optimizer)
    say(f"rank {dist.get_rank()}: {len(LAYOUTS)} plans hold")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
