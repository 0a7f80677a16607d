"""Loss scaling: gradients of fp16 activations that would vanish below 6e-8 are kept by a larger loss.

Mixed precision training (https://arxiv.org/abs/1710.03740) with Megatron's own dynamic scale: a gradient that is not
finite lowers it by half, `optim.loss_scale_window` steps in a row with finite ones double it. It is a power of two, so
scaling rounds nothing. fp32 and bf16 have the range of the gradients and no scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from rlpost.policy.cpu import megatron_device

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from rlpost.config.schema import OptimConfig

SMALLEST = 1.0
OVERFLOWS = "fp16 holds no activation above 65504; model.dtype=bf16 does"


class LossScale:
    """The scale of one optimizer's loss: of fp16 chunks Megatron's dynamic one, else 1 for ever.

    The schedules multiply the last stage's loss by it. Every rank keeps the same, as all see the same gradient norm.
    """

    def __init__(self, chunks: list[DistributedDataParallel], optim: OptimConfig) -> None:
        self._scaler: DynamicGradScaler | None = None
        config = chunks[0].config  # one of all chunks
        if not config.fp16:
            return
        with megatron_device():
            self._scaler = DynamicGradScaler(
                initial_scale=optim.initial_loss_scale,
                min_scale=SMALLEST,
                growth_factor=2.0,
                backoff_factor=0.5,
                growth_interval=optim.loss_scale_window,
                hysteresis=optim.loss_scale_hysteresis,
            )
        config.grad_scale_func = lambda loss: loss * self._scaler.scale

    @property
    def value(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.scale)

    def after_step(self, finite: bool) -> dict[str, float]:
        """To be called once a step. The metric `train/loss_scale`: the scale that this step had, of fp16 alone."""
        if self._scaler is None:
            return {}
        used = self.value
        self._scaler.update(not finite)
        return {"train/loss_scale": used}

    def state(self) -> dict[str, float]:
        """Scalars for a checkpoint, none without a scale."""
        if self._scaler is None:
            return {}
        state = self._scaler.state_dict()
        trackers = {name: state[name] for name in ("growth_tracker", "hysteresis_tracker")}
        return {"loss_scale": self.value, **trackers}

    def load(self, scalars: Mapping[str, float]) -> None:
        """The inverse. From a checkpoint of another dtype, which has none, the scale stays as it is."""
        if self._scaler is None or "loss_scale" not in scalars:
            return
        trackers = {name: scalars[name] for name in ("growth_tracker", "hysteresis_tracker")}
        with megatron_device():
            self._scaler.load_state_dict({"scale": torch.tensor([scalars["loss_scale"]]), **trackers})


def scale_is_settling(metrics: Mapping[str, float], prefix: str) -> bool:
    """Whether a skipped step says no more than that the loss scale was too large, as the first ones of fp16 do: its
    loss was finite, and the scale could still fall. A loss that is not finite is no matter of scale.

    metrics: of the step; prefix: `train` or `critic`.
    """
    return metrics.get(f"{prefix}/loss_scale", SMALLEST) > SMALLEST and math.isfinite(metrics[f"{prefix}/loss"])
