"""Metrics of a loss, pooled exactly over the micro-batches and the data-parallel ranks of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlpost.parallel import all_gather_objects

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class MetricPool:
    """Sums in float64: the mean of a metric is over all live tokens of the step, never a mean of means."""

    def __init__(self) -> None:
        self._loss = torch.zeros((), dtype=torch.float64)
        self._sums: dict[str, Tensor] = {}  # name: (sum, count) of the live tokens
        self._maxima: dict[str, Tensor] = {}

    def add(self, loss: Tensor, metrics: dict[str, Tensor], live_N: Tensor) -> None:
        """One micro-batch: its share of the loss, and metrics [N] of which the live tokens count."""
        self._loss = self._loss.to(loss.device) + loss.detach().double()
        for name, value_N in metrics.items():
            live = value_N.detach()[live_N].double()
            if live.numel() == 0:
                continue
            if name.endswith("/max"):
                largest = live.max()
                self._maxima[name] = torch.maximum(self._maxima.get(name, largest), largest)
            else:
                pair = torch.stack([live.sum(), live.new_tensor(live.numel())])
                self._sums[name] = self._sums.get(name, torch.zeros_like(pair)) + pair

    def reduced(self, group: ProcessGroup) -> dict[str, float]:
        """`train/loss` and every metric that some rank had live tokens for. Collective over `group`."""
        mine = (
            float(self._loss),
            {name: pair.tolist() for name, pair in self._sums.items()},
            {name: float(value) for name, value in self._maxima.items()},
        )
        everyone = all_gather_objects(mine, group)
        result = {"train/loss": sum(loss for loss, _, _ in everyone)}
        for name in dict.fromkeys(name for _, sums, _ in everyone for name in sums):
            pairs = [sums[name] for _, sums, _ in everyone if name in sums]
            result[name] = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
        for name in dict.fromkeys(name for _, _, maxima in everyone for name in maxima):
            result[name] = max(maxima[name] for _, _, maxima in everyone if name in maxima)
        return result
