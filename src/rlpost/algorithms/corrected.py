"""The rollout correction that several algorithms share: its fields, and the factor on the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlpost.algorithms.base import Algorithm, live_field
from rlpost.losses.correction import CORRECTIONS, correction_weights, mismatch_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.types import MicroBatch, Sample


@dataclass
class CorrectedAlgorithm(Algorithm):
    """An algorithm on sampled responses.

    correction: null, or tis | icepop | mis, which weigh tokens by trainer over engine probability within
    [correction_low, correction_high] (null: the defaults of `losses/correction.py`).
    """

    correction: str | None = None
    correction_low: float | None = None
    correction_high: float | None = None

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.check_choice("correction", (None, *CORRECTIONS))
        wrong = [
            *self.check_number("correction_low", optional=True),
            *self.check_number("correction_high", above=True, optional=True),
        ]
        yield from wrong
        if self.correction is None and (self.correction_low, self.correction_high) != (None, None):
            yield "algorithm.correction_low and algorithm.correction_high bound algorithm.correction, which is null"
        if self.correction in CORRECTIONS and not wrong:
            low, high = self.correction_bounds()
            if low > high:
                yield f"algorithm.correction_low={low} is not allowed; it is at most correction_high={high}"

    def correction_bounds(self) -> tuple[float, float]:
        low, high = CORRECTIONS[self.correction]
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    def prepare(self, samples: Sequence[Sample]) -> dict[str, float]:
        for sample in samples:
            sample.tokens["rollout_logprobs"] = torch.tensor(sample.rollout_logprobs, dtype=torch.float32)
        return {}

    def correct(self, micro: MicroBatch, logp_N: Tensor, old_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(factor_N on the per-token loss, metrics of the gap between trainer and engine)."""
        rollout_N, mask_N = live_field(micro, "rollout_logprobs"), micro.fields["loss_mask"]
        metrics = mismatch_metrics(old_N, rollout_N, mask_N)
        if self.correction is None:
            return torch.ones_like(logp_N), metrics
        low, high = self.correction_bounds()
        factor_N, cut = correction_weights(
            self.correction, old_N, rollout_N, sequence_N=micro.sequence_N, mask_N=mask_N, low=low, high=high
        )
        return factor_N, metrics | cut


def old_logprobs(micro: MicroBatch, logp_N: Tensor) -> Tensor:
    """Where `old` was not computed, it equals the current log-probs (one optimizer step per rollout): ρ ≡ 1."""
    return live_field(micro, "old_logprobs") if "old_logprobs" in micro.fields else logp_N.detach()
