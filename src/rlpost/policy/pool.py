"""Metrics of a loss, pooled exactly over the micro-batches and the data-parallel ranks of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlpost.parallel import all_gather_objects

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class MetricPool:
    """Sums in float64: the mean of a metric is over all live tokens of the step, never a mean of means. Nothing is read
    from a GPU before the end of the step, or it would wait for each micro-batch."""

    def __init__(self) -> None:
        self._loss = torch.zeros((), dtype=torch.float64)
        self._sums: dict[str, Tensor] = {}  # name: (sum, count) of the live tokens
        self._maxima: dict[str, Tensor] = {}  # name: (maximum, more than 0 where a token was live)

    def add(self, loss: Tensor, metrics: dict[str, Tensor], live_N: Tensor) -> None:
        """One micro-batch: its share of the loss, and metrics [N] of which the live tokens count."""
        self._loss = self._loss.to(loss.device) + loss.detach().double()
        count = live_N.sum(dtype=torch.float64)
        for name, value_N in metrics.items():
            value_N = value_N.detach().double()
            if name.endswith("/max"):
                pair = torch.stack([value_N.masked_fill(~live_N, -torch.inf).amax(), count])
                self._maxima[name] = torch.maximum(self._maxima.get(name, pair), pair)
            else:
                pair = torch.stack([value_N.masked_fill(~live_N, 0.0).sum(), count])
                self._sums[name] = self._sums.get(name, torch.zeros_like(pair)) + pair

    def reduced(self, group: ProcessGroup) -> dict[str, float]:
        """`train/loss` and every metric that some rank had live tokens for. Collective over `group`."""
        sums, maxima = ({k: pair.tolist() for k, pair in pairs.items()} for pairs in (self._sums, self._maxima))
        mine = (
            float(self._loss),
            {name: pair for name, pair in sums.items() if pair[1]},
            {name: largest for name, (largest, count) in maxima.items() if count},
        )
        everyone = all_gather_objects(mine, group)
        result = {"train/loss": sum(loss for loss, _, _ in everyone)}
        for name in dict.fromkeys(name for _, sums, _ in everyone for name in sums):
            pairs = [sums[name] for _, sums, _ in everyone if name in sums]
            result[name] = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
        for name in dict.fromkeys(name for _, _, maxima in everyone for name in maxima):
            result[name] = max(maxima[name] for _, _, maxima in everyone if name in maxima)
        return result
