"""Rewards that an untrained model earns, and ones that go wrong."""

import os

from rlpost import RewardResult


def variety(sample):
    """The share of different tokens, with something for the teacher to read."""
    score = len(set(sample.response_ids)) / max(1, len(sample.response_ids))
    return RewardResult(score, feedback="first second third fine fine fine")


def constant(sample):
    return 0.5


def broken_on_rank_1(sample):
    if os.environ.get("RANK") == "1":
        raise ZeroDivisionError("the scorer divided by zero")
    return 0.5


def collapsing(sample):
    """As variety, until the weights have changed three times; then 0, with nothing to say."""
    return variety(sample) if sample.version <= 3 else 0.0
