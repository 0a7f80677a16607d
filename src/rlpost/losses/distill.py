"""Distillation losses on log-probs of listed ids: divergences, the tail's bucket, the sampled token.

student, teacher: [..., K] log-probs of the same ids. The full vocabulary is `Head.divergence`, which streams the same
formulas. The teacher never gets a gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlpost.losses.policy import log_ratio

# exp(−80) is the smallest probability told from 0: an id that is absent (−inf) costs 80 nats, not infinity.
LOGP_FLOOR = -80.0
TAILS = ("bucket", "renormalize")


def divergence(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    """[...] in nats, summed over the last dimension; both sides are log-probs of whole distributions.

    alpha 0: forward KL(Q‖S). alpha 1: reverse KL(S‖Q). Between: (1−α)·KL(S‖M) + α·KL(Q‖M) with M = (1−α)S + αQ, the
    gradient going through M too (its limits at 0 and 1 are 0, so the ends are those KLs instead). Never negative.
    An id with −inf on both sides counts as absent.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha}: must be 0 … 1")
    S, Q = student.clamp_min(LOGP_FLOOR), teacher.detach().clamp_min(LOGP_FLOOR)
    if alpha == 0:
        value = (Q.exp() * (Q - S)).sum(dim=-1)
    elif alpha == 1:
        value = (S.exp() * (S - Q)).sum(dim=-1)
    else:
        M = torch.logaddexp(S + math.log1p(-alpha), Q + math.log(alpha))
        value = ((1 - alpha) * S.exp() * (S - M) + alpha * Q.exp() * (Q - M)).sum(dim=-1)
    # Rounding may leave −1e−8 where both agree; the gradient stays that of the sum.
    return value + (value.clamp_min(0.0) - value).detach()


def with_tail_bucket(logprobs: Tensor) -> Tensor:
    """[..., K] -> [..., K + 1]: one bucket more for the mass of all ids that are not listed."""
    listed = logprobs.logsumexp(dim=-1, keepdim=True)
    tail = torch.log(-torch.expm1(listed.clamp_max(-1e-7)))
    return torch.cat([logprobs, tail], dim=-1)


def renormalize(logprobs: Tensor) -> Tensor:
    """The distribution over the listed ids alone."""
    return logprobs.log_softmax(dim=-1)


def close_tail(logprobs: Tensor, tail: str) -> Tensor:
    if tail not in TAILS:
        raise ValueError(f"tail={tail!r}: must be one of {', '.join(TAILS)}")
    return with_tail_bucket(logprobs) if tail == "bucket" else renormalize(logprobs)


def sampled_loss(logp_N: Tensor, teacher_N: Tensor) -> Tensor:
    """sg(S(y) − Q(y))·S(y) on the sampled token y alone: the gradient is an unbiased one of the reverse KL, whereas
    that of S(y) − Q(y) itself is zero in expectation."""
    return (logp_N - teacher_N).detach() * logp_N


def is_clip_weights(logp_N: Tensor, old_N: Tensor, ceiling: float) -> Tensor:
    """min(ρ, ceiling), detached: the importance weight of tokens that older weights sampled."""
    return log_ratio(logp_N, old_N).exp().clamp_max(ceiling).detach()
