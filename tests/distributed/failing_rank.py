"""A rank fails while the others wait for it: in the phase's own collective, or at the agreement."""

import sys

import torch
import torch.distributed as dist
from launch import say

from rlpost.config.schema import PhaseConfig
from rlpost.failures import PhaseError
from rlpost.phases import Agreement, PhaseMachine


def main(where: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def train(work: None) -> None:
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            raise RuntimeError("gradient buffer is on fire")
        if where == "collective":
            dist.all_reduce(torch.ones(1))  # rank 1 never comes

    machine = PhaseMachine([PhaseConfig("train")], {"train": train}, {}, Agreement())
    try:
        machine.run(0, 3, None)
    except PhaseError as error:
        say(f"rank {rank} raised: {error}")
        sys.exit(1)
    say(f"rank {rank} went on")


if __name__ == "__main__":
    main(sys.argv[1])
