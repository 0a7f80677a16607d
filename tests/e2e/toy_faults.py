"""What goes wrong, on demand: rewards, losses and filters for the tests of failures."""

import ctypes
import os
import threading

import torch
from toy_rewards import variety

_calls = 0


def _count() -> int:
    global _calls
    _calls += 1
    return _calls


def raising(sample):
    raise ZeroDivisionError("the scorer divided by zero")


def hanging(sample):
    threading.Event().wait()


def crashing(sample):
    ctypes.string_at(0)


def crashing_on_rank_1(sample):
    return crashing(sample) if os.environ["RANK"] == "1" and _count() > 40 else variety(sample)


def filling(sample):
    """From the FILL_AT-th call on, FREE_BYTES are left on the disk of RUN_DIR."""
    if _count() == int(os.environ["FILL_AT"]):
        disk = os.statvfs(os.environ["RUN_DIR"])
        with open(os.path.join(os.environ["RUN_DIR"], "filler"), "wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, disk.f_bavail * disk.f_bsize - int(os.environ["FREE_BYTES"]))
    return variety(sample)


def forget_calls():
    global _calls
    _calls = 0


def greedy_filter(group):
    torch.empty(2**50)
    return True


def greedy_loss(logp_N, old_N, advantages_N, micro):
    torch.empty(2**50)
    return nan_loss(logp_N, old_N, advantages_N, micro)


def nan_loss(logp_N, old_N, advantages_N, micro):
    return logp_N * float("nan"), torch.zeros_like(logp_N)


def nan_loss_on_rank_1_once(logp_N, old_N, advantages_N, micro):
    """In the second step."""
    bad = os.environ["RANK"] == "1" and _count() == 2
    return -advantages_N * logp_N * (float("nan") if bad else 1.0), torch.zeros_like(logp_N)


def hanging_later(sample):
    if _count() > 70:
        os.write(2, b"the reward hangs\n")
        threading.Event().wait()
    return variety(sample)
