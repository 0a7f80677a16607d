"""Per-token estimators of KL(policy‖reference) from the sampled tokens (http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from torch import Tensor

from rlpost.losses.policy import MAX_LOG_RATIO, log_ratio

ESTIMATORS = ("k1", "k2", "k3", "low_var_kl")


def kl(
    logp_N: Tensor, ref_N: Tensor, estimator: str = "k3", *, unbiased: bool = False, old_N: Tensor | None = None
) -> Tensor:
    """[N] in nats, with d = logp − ref: k1 = d, k2 = d²/2, k3 = e^−d − 1 + d, low_var_kl = k3 clamped to ±10.

    unbiased: times ρ = exp(logp − old), so that the gradient of the estimate is the true gradient of the KL
    (https://arxiv.org/abs/2512.02556); old_N defaults to the detached logp_N.
    """
    d_N = logp_N - ref_N
    if estimator == "k1":
        value_N = d_N
    elif estimator == "k2":
        value_N = d_N.square() / 2
    elif estimator in ("k3", "low_var_kl"):
        value_N = d_N.neg().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - 1 + d_N
        if estimator == "low_var_kl":
            value_N = value_N.clamp(-10.0, 10.0)
    else:
        raise ValueError(f"estimator={estimator!r}: must be one of {', '.join(ESTIMATORS)}")
    if unbiased:
        value_N = value_N * log_ratio(logp_N, logp_N.detach() if old_N is None else old_N).exp()
    return value_N
