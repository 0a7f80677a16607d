"""A rank fails, dies or hangs while the others wait for it: in the phase's own collective, or at the agreement."""

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from launch import say

from rlpost.config.schema import PhaseConfig
from rlpost.failures import PhaseError, report
from rlpost.launcher import leave
from rlpost.phases import Agreement, PhaseMachine
from rlpost.signals import StopOnSignal
from rlpost.watch import Watch

LIMIT_S = 2.0


def raises():
    raise RuntimeError("gradient buffer is on fire")


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def is_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def is_stopped_again_late():
    """Who wakes it for its stacks is slow to stop it again, and its watch-dog slow to look: it runs on meanwhile."""
    is_stopped()


def make_slow(watch: Watch) -> None:
    look, kill = watch._look, os.kill

    def slow_look() -> None:
        time.sleep(0.5)
        look()

    def slow_kill(pid: int, number: int) -> None:
        if number == signal.SIGSTOP and pid != os.getpid():
            time.sleep(1)
        kill(pid, number)

    watch._look, os.kill = slow_look, slow_kill


def waits():
    """In the interpreter, which other threads can have."""
    threading.Event().wait()


def spins():
    """In C, without ever giving the interpreter back."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def main(fault: str, where: str, directory: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def train(work: None) -> None:
        dist.all_reduce(torch.ones(1))
        if rank == 1 or where == "everywhere":
            globals()[fault]()
        if where == "collective":
            dist.all_reduce(torch.ones(1))  # rank 1 never comes

    agreement = Agreement(directory, LIMIT_S)
    if fault == "is_stopped_again_late":
        make_slow(agreement.watch)
    machine = PhaseMachine([PhaseConfig("train")], {"train": train}, {}, agreement)
    try:
        with StopOnSignal(agreement):  # as the trainer: torchrun sends SIGTERM as soon as one rank is gone
            machine.run(0, 3, None)
    except PhaseError as error:
        report(error, directory)
        leave(1)
    say(f"rank {rank} went on")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
