"""The one denominator: per-token weights of a whole optimizer step, so that every loss is Σ weight·ℓ.

The weights are computed once from the loss masks of *all* samples of the step (all micro-batches, all ranks), so
neither the value nor the gradient depends on how the step is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

REDUCTIONS = ("token_mean", "sequence_mean", "sequence_sum", "constant")


def token_weights(
    loss_masks: Sequence[Sequence[int]], reduction: str, max_response_tokens: int | None = None
) -> list[Tensor]:
    """Weights [R] (fp32) for each sample of the optimizer step from its loss mask over response tokens.

    token_mean: 1 / live tokens of the step. sequence_mean: 1 / (live tokens of the sequence · sequences), where a
    fully masked sequence counts with 0. sequence_sum: 1 / sequences. constant: 1 / (sequences ·
    max_response_tokens), Dr. GRPO (https://arxiv.org/abs/2503.20783). A step without a live token has weights 0.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: must be one of {', '.join(REDUCTIONS)}")
    if reduction == "constant" and not max_response_tokens:
        raise ValueError(f"max_response_tokens={max_response_tokens}: reduction=constant needs a positive number")
    masks = [torch.as_tensor(mask, dtype=torch.float64) for mask in loss_masks]
    live = [max(float(mask.sum()), 1.0) for mask in masks]
    sequences = max(len(masks), 1)
    if reduction == "token_mean":
        denominators = [max(sum(float(mask.sum()) for mask in masks), 1.0)] * len(masks)
    elif reduction == "sequence_mean":
        denominators = [n * sequences for n in live]
    elif reduction == "sequence_sum":
        denominators = [sequences] * len(masks)
    else:
        denominators = [sequences * max_response_tokens] * len(masks)
    return [(mask / d).float() for mask, d in zip(masks, denominators, strict=True)]
