"""Corrections for the gap between the engine that sampled and the trainer that learns (rollout mismatch).

w = exp(old − rollout) per token, or with the current log-probs where `old` is not computed. The weights are
detached; masked slots are never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlpost.losses.policy import log_ratio, sequence_mean

# Default bounds (low, high) on w; those of `mis` are on a geometric mean over the sequence, which is narrower.
CORRECTIONS = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "mis": (0.9, 1.1)}


def correction_weights(
    name: str,
    old_N: Tensor,
    rollout_N: Tensor,
    *,
    sequence_N: Tensor,
    mask_N: Tensor,
    low: float | None = None,
    high: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(weights_N, metrics_N). tis: clamp(w, low, high) (truncated importance sampling); icepop: w inside [low, high],
    0 outside (https://arxiv.org/abs/2510.18855); mis: 1 where the sequence's geometric-mean w is inside, 0 for every
    token of the others. The metrics are those of w before anything is cut."""
    if name not in CORRECTIONS:
        raise ValueError(f"correction={name!r}: must be one of {', '.join(CORRECTIONS)}")
    low = CORRECTIONS[name][0] if low is None else low
    high = CORRECTIONS[name][1] if high is None else high
    w_N = log_ratio(old_N, rollout_N).exp().detach().masked_fill(mask_N <= 0, 1.0)
    bounded_N = sequence_mean(w_N.log(), sequence_N, mask_N).exp() if name == "mis" else w_N
    inside_N = (bounded_N >= low) & (bounded_N <= high)
    if name == "tis":
        weights_N = w_N.clamp(low, high)
    elif name == "icepop":
        weights_N = w_N.masked_fill(~inside_N, 0.0)
    else:
        weights_N = inside_N.to(w_N.dtype)
    metrics = {
        "correction/weight": w_N,
        "correction/weight/max": w_N,
        "correction/cut_fraction": (~inside_N).to(w_N.dtype),
    }
    return weights_N, metrics


def mismatch_metrics(old_N: Tensor, rollout_N: Tensor, mask_N: Tensor) -> dict[str, Tensor]:
    """|old − rollout| and the k3 estimate of KL(rollout‖trainer), per token, detached."""
    gap_N = torch.where(mask_N > 0, (old_N - rollout_N).detach(), 0.0)
    return {
        "policy/kl_rollout": gap_N.clamp(-20.0, 20.0).exp() - 1 - gap_N,
        "policy/logprob_diff": gap_N.abs(),
        "policy/logprob_diff/max": gap_N.abs(),
    }
