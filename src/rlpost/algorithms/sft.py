"""Supervised fine-tuning: the responses come from the data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlpost.algorithms.base import Algorithm
from rlpost.types import LossOutput

if TYPE_CHECKING:
    from rlpost.policy.logits import Head
    from rlpost.types import MicroBatch


@dataclass
class SFT(Algorithm):
    """Cross-entropy on the live response tokens."""

    name: ClassVar[str] = "sft"

    def loss(self, head: Head, micro: MicroBatch) -> LossOutput:
        nll_N = -head.logprobs(micro.target_N).logprobs_N
        return LossOutput(nll_N, {"sft/nll": nll_N.detach()})
