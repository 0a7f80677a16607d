"""Does the engine answer with the weights that were published? One prompt's log-probs, from it and from the trainer.

An engine that woke without a publish serves garbage and says nothing: every token then has about the log-prob
−ln(vocabulary).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rlpost.data.packing import pack
from rlpost.policy.loss_scale import OVERFLOWS
from rlpost.types import Prompt, Sample

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.policy.logits import Head
    from rlpost.policy.protocol import Policy
    from rlpost.rollout.engine import Engine
    from rlpost.types import MicroBatch

log = logging.getLogger(__name__)

TOKENS = 64
# Nats, in the mean over the tokens. Kernels differ by rounding: Transformers' own bf16 is .02–.05 from its fp32 on real
# weights (SmolLM2-135M), its fp16 .003–.006. Other weights are off by whole nats.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}
NOTABLE = 0.02  # more of it than this is said


class CanaryError(RuntimeError):
    """The engine's log-probs are not the trainer's."""


class Canary:
    """mode: off, first (until the first comparison was passed) or always (once after each publish). dtype: the coarser
    one of engine and trainer. Every rank compares its own engine."""

    def __init__(self, policy: Policy, engine: Engine, prompt_ids: Sequence[int], mode: str, dtype: torch.dtype):
        self._policy, self._engine, self._mode = policy, engine, mode
        self._dtype, self._tolerance = dtype, TOLERANCE[dtype]
        self._ids = list(prompt_ids)[:TOKENS]
        self._expected: Tensor | None = None
        self._found: dict[str, float] = {}
        self._said = False

    def published(self) -> None:
        """The engine has the policy's weights now: what it should answer. Collective."""
        if self._mode == "off" or len(self._ids) < 2:
            return
        sample = Sample(Prompt(0, [], self._ids[:1]), group_id=0, index=0, response_ids=self._ids[1:])
        [result] = self._policy.score(pack([sample], len(self._ids)), _logprobs)
        self._expected = result["logprobs"].cpu()

    def check(self) -> None:
        """Before sampling: compare, where that is due. Raises CanaryError above the tolerance."""
        if self._expected is None:
            return
        [score] = self._engine.score([self._ids], [1])
        gap = (score.logprobs - self._expected).abs().mean().item()
        if not gap <= self._tolerance:
            advice = "publish.verify=always compares every tensor; rollout.canary=off goes on regardless"
            if math.isnan(gap) and self._dtype is torch.float16:
                advice = OVERFLOWS
            raise CanaryError(
                f"the engine does not serve the trainer's weights: mean |Δ log-prob| over {len(self._expected)} tokens "
                f"is {gap:.3g}, more than {self._tolerance}. {advice}"
            )
        self._expected = None
        log.info("the engine serves the trainer's weights: mean |Δ log-prob| %.2g", gap)
        if gap > NOTABLE and self._dtype is torch.bfloat16 and not self._said:
            self._said = True
            log.warning(
                "mean |Δ log-prob| of engine and trainer is %.2g: bf16 rounds that much on some models; "
                "model.dtype=fp16 rounds eight times finer",
                gap,
            )
        if self._mode == "first":
            self._mode = "off"
        else:
            self._found = {"rollout/canary": gap}

    def metrics(self) -> dict[str, float]:
        """rollout/canary, where every publish is compared: the mean |Δ log-prob|."""
        found, self._found = self._found, {}
        return found


def _logprobs(head: Head, micro: MicroBatch) -> dict[str, Tensor]:
    """At temperature 1, the only one at which every engine scores."""
    plain = head.beside(head.hidden_NH, head.weight_VH, temperature=1.0)
    return {"logprobs": plain.logprobs(micro.target_N).logprobs_N}
