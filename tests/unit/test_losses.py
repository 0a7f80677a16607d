"""Weights, advantages, policy losses, KL estimators, corrections: hand-computed values and invariants."""

import math
import statistics

import pytest
import torch

from rlpost.losses import policy
from rlpost.losses.advantage import EmaBaseline, group_advantages
from rlpost.losses.correction import correction_weights, mismatch_metrics
from rlpost.losses.kl import ESTIMATORS, kl
from rlpost.losses.reduce import token_weights

MASKS = [[1, 0, 1], [1], [0, 0], [1, 1, 1, 1]]


def vector(*values, **options):
    return torch.tensor(values, dtype=torch.float64, **options)


def gradient(loss_N, x):
    return torch.autograd.grad(loss_N.sum(), x)[0]


# The one denominator


@pytest.mark.parametrize(
    ("reduction", "want"),
    [
        ("token_mean", [[1 / 7, 0, 1 / 7], [1 / 7], [0, 0], [1 / 7] * 4]),
        ("sequence_mean", [[1 / 8, 0, 1 / 8], [1 / 4], [0, 0], [1 / 16] * 4]),
        ("sequence_sum", [[1 / 4, 0, 1 / 4], [1 / 4], [0, 0], [1 / 4] * 4]),
        ("constant", [[1 / 40, 0, 1 / 40], [1 / 40], [0, 0], [1 / 40] * 4]),
    ],
)
def test_token_weights(reduction, want):
    weights = token_weights(MASKS, reduction, 10)
    for got, expected in zip(weights, want, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32))


def test_token_weights_of_a_step_without_a_live_token_are_zero():
    for reduction in ("token_mean", "sequence_mean", "sequence_sum", "constant"):
        assert all(w.eq(0).all() for w in token_weights([[0, 0], [0], []], reduction, 4))
    assert token_weights([], "token_mean") == []


def test_token_weights_errors():
    with pytest.raises(ValueError, match="reduction='mean': must be one of token_mean"):
        token_weights(MASKS, "mean")
    with pytest.raises(ValueError, match="max_response_tokens=None"):
        token_weights(MASKS, "constant")


# Advantages


def test_group_advantages_by_id_uneven_and_interleaved():
    rewards, ids = [1.0, 0.0, 5.0, 0.0, 7.0, 2.0, 2.0], [4, 9, 4, 4, 1, 9, 9]
    values, flat = group_advantages(rewards, ids)
    groups = {4: [1.0, 5.0, 0.0], 9: [0.0, 2.0, 2.0]}
    for i, (reward, group) in enumerate(zip(rewards, ids)):
        if group == 1:
            assert values[i] == 0  # a group of one
            continue
        r = groups[group]
        assert values[i].item() == pytest.approx((reward - statistics.mean(r)) / (statistics.stdev(r) + 1e-6), rel=1e-6)
    assert flat == 1
    centred, _ = group_advantages(rewards, ids, normalize_std=False)
    assert centred[2].item() == pytest.approx(3.0)
    rloo, _ = group_advantages(rewards, ids, "rloo")
    assert rloo[2].item() == pytest.approx(5.0 - (1.0 + 0.0) / 2)  # the mean of the others as baseline


def test_equal_rewards_give_zero_and_are_counted():
    for estimator in ("grpo", "rloo"):
        values, flat = group_advantages([0.1] * 6, [0, 0, 0, 1, 1, 1], estimator)
        assert values.eq(0).all() and flat == 2


def test_ema_baseline_is_the_value_before_the_step():
    baseline = EmaBaseline(decay=0.5)
    torch.testing.assert_close(baseline.advantages([1.0, 3.0]), torch.tensor([-1.0, 1.0]))
    torch.testing.assert_close(baseline.advantages([4.0, 6.0]), torch.tensor([2.0, 4.0]))
    assert baseline.value == pytest.approx(3.5)


# Policy losses


def test_ppo_clip():
    old = vector(-1, -1, -1, -1)
    logp = (old + vector(1.5, 0.5, 1.5, 0.5).log()).requires_grad_()
    loss, clipped = policy.ppo_clip(logp, old, vector(1, 1, -1, -1))
    torch.testing.assert_close(loss, vector(-1.2, -0.5, 1.5, 0.8))
    torch.testing.assert_close(clipped, vector(1, 0, 0, 1))
    torch.testing.assert_close(gradient(loss, logp), vector(0, -0.5, 1.5, 0))
    high, _ = policy.ppo_clip(logp, old, vector(1, 1, -1, -1), clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(high[0], vector(-1.28)[0])


def test_dual_clip_bounds_a_negative_advantage():
    logp = vector(math.log(9.0), math.log(9.0)).requires_grad_()
    loss, clipped = policy.ppo_clip(logp, torch.zeros(2), vector(-2, 2), dual_clip=3.0)
    torch.testing.assert_close(loss, vector(6, -2.4))
    torch.testing.assert_close(clipped, vector(1, 1))
    torch.testing.assert_close(gradient(loss, logp), vector(0, 0))


def test_gspo_uses_the_sequence_ratio_and_reaches_every_live_token():
    sequence, mask = torch.tensor([0, 0, 0, 1, 1]), vector(1, 0, 1, 1, 1)
    log_ratio = vector(0.02, 10.0, 0.04, 0.5, 0.7)
    logp = log_ratio.clone().requires_grad_()
    advantages = vector(1, 1, 1, 2, 2)
    loss, clipped = policy.gspo(
        logp, torch.zeros(5).double(), advantages, sequence_N=sequence, mask_N=mask, clip_low=0.1
    )
    first = math.exp(0.03)
    torch.testing.assert_close(loss, vector(-first, -first, -first, -2.2, -2.2))
    torch.testing.assert_close(clipped, vector(0, 0, 0, 1, 1))
    torch.testing.assert_close(gradient(loss, logp)[mask > 0], vector(-first, -first, 0, 0))


def test_gspo_of_one_token_sequences_is_ppo():
    g = torch.Generator().manual_seed(0)
    logp, old, advantages = (torch.randn(9, generator=g) for _ in range(3))
    a = policy.gspo(logp, old, advantages, sequence_N=torch.arange(9), mask_N=torch.ones(9))
    b = policy.ppo_clip(logp, old, advantages)
    torch.testing.assert_close(a, b)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    logp = vector(math.log(3.0), math.log(0.1), 0.0).requires_grad_()
    loss, clipped = policy.cispo(logp, torch.zeros(3), vector(1, 1, -2))
    torch.testing.assert_close(gradient(loss, logp), vector(-1.2, -0.8, 2))
    torch.testing.assert_close(clipped, vector(1, 1, 0))


def test_reinforce():
    logp = vector(-1, -2).requires_grad_()
    torch.testing.assert_close(gradient(policy.reinforce(logp, vector(3, -1))[0], logp), vector(-3, 1))


def test_sapo():
    logp = vector(0, 0).requires_grad_()
    loss, _ = policy.sapo(logp, torch.zeros(2), vector(1, -1))
    torch.testing.assert_close(loss, vector(-2, 2 / 1.05))
    torch.testing.assert_close(gradient(loss, logp), vector(-1, 1))  # on-policy: that of −A·ρ
    far, _ = policy.sapo(vector(2.0), torch.zeros(1), vector(-1))
    torch.testing.assert_close(far[0], vector(4 / 1.05)[0] * torch.sigmoid(1.05 * (vector(2.0).exp() - 1))[0])


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "sapo"])
def test_a_huge_ratio_stays_finite(name):
    logp = vector(0, -1000).requires_grad_()
    old, advantages = vector(-1000, 0), vector(-1, -1)
    extra = {"sequence_N": torch.arange(2), "mask_N": torch.ones(2)} if name == "gspo" else {}
    loss, _ = getattr(policy, name)(logp, old, advantages, **extra)
    assert loss.isfinite().all() and gradient(loss, logp).isfinite().all()


SMOOTH = {
    "ppo_clip": lambda logp, old, A: policy.ppo_clip(logp, old, A, clip_low=0.2, clip_high=0.28, dual_clip=2.0)[0],
    "reinforce": lambda logp, old, A: policy.reinforce(logp, A)[0],
    "sapo": lambda logp, old, A: policy.sapo(logp, old, A)[0],
    **{name: lambda logp, old, A, name=name: kl(logp, old, name) for name in ESTIMATORS},
    **{f"{name}, unbiased": lambda z, r, A, n=name: kl(z, r, n, unbiased=True, old_N=A) for name in ESTIMATORS},
}


@pytest.mark.parametrize("name", SMOOTH)
def test_finite_differences(name):
    """Of what holds no stopped gradient; the closed forms of the others are above."""
    g = torch.Generator().manual_seed(3)
    logp, old, advantages = (torch.randn(40, generator=g).double() for _ in range(3))
    assert torch.autograd.gradcheck(lambda x: SMOOTH[name](x, old, advantages), logp.requires_grad_())


# KL


def test_kl_estimators():
    logp, ref = vector(-1, -2, 0), vector(-1.5, -1, -30)
    d = [0.5, -1.0, 30.0]
    torch.testing.assert_close(kl(logp, ref, "k1"), vector(*d))
    torch.testing.assert_close(kl(logp, ref, "k2"), vector(*(x * x / 2 for x in d)))
    k3 = [math.exp(-x) - 1 + x for x in d]
    torch.testing.assert_close(kl(logp, ref, "k3"), vector(*k3), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(kl(logp, ref, "low_var_kl"), vector(k3[0], k3[1], 10))
    for estimator in ESTIMATORS:
        assert kl(logp, logp, estimator).eq(0).all()
    with pytest.raises(ValueError, match="estimator='k4': must be one of k1, k2"):
        kl(logp, ref, "k4")


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_estimators_gradient_is_that_of_the_kl(estimator):
    g = torch.Generator().manual_seed(1)
    z, ref = torch.randn(6, generator=g).double().requires_grad_(), torch.randn(6, generator=g).double()
    S, R = z.log_softmax(0), ref.log_softmax(0)
    true = torch.autograd.grad((S.exp() * (S - R)).sum(), z, retain_graph=True)[0]
    # The expectation over the sampled token, by enumeration.
    estimate = (S.detach().exp() * kl(S, R, estimator, unbiased=True)).sum()
    torch.testing.assert_close(torch.autograd.grad(estimate, z, retain_graph=True)[0], true)
    plain = torch.autograd.grad((S.detach().exp() * kl(S, R, estimator)).sum(), z)[0]
    assert (plain - true).abs().max() > 1e-3


# Corrections


@pytest.mark.parametrize(
    ("name", "bounds", "want", "cut"),
    [
        ("tis", {}, (0.5, 2, 1, 1.2, 1), (0, 1, 0, 0, 0)),
        ("tis", {"low": 0.8, "high": 1.1}, (0.8, 1.1, 1, 1.1, 1), (1, 1, 0, 1, 0)),
        ("icepop", {"low": 0.4, "high": 2.0}, (0.5, 0, 1, 1.2, 1), (0, 1, 0, 0, 0)),
        # Geometric means: (0.5 · 3)^½ ≈ 1.22 and (1 · 1.2)^½ ≈ 1.095, the masked slot apart.
        ("mis", {"low": 0.9, "high": 1.1}, (0, 0, 1, 1, 1), (1, 1, 0, 0, 0)),
    ],
)
def test_corrections(name, bounds, want, cut):
    w, mask, sequence = vector(0.5, 3, 1, 1.2, 99), vector(1, 1, 1, 1, 0), torch.tensor([0, 0, 1, 1, 1])
    old = w.log().requires_grad_()
    options = {"sequence_N": sequence, "mask_N": mask, **bounds}
    weights, metrics = correction_weights(name, old, torch.zeros(5).double(), **options)
    torch.testing.assert_close(weights, vector(*want))
    torch.testing.assert_close(metrics["correction/cut_fraction"], vector(*cut))
    torch.testing.assert_close(metrics["correction/weight"][:4], w[:4])  # before anything is cut
    assert not weights.requires_grad


def test_mismatch_metrics():
    old, rollout = vector(-1, -2, 5), vector(-1.5, -1, float("nan"))
    metrics = mismatch_metrics(old, rollout, vector(1, 1, 0))
    torch.testing.assert_close(metrics["policy/logprob_diff"], vector(0.5, 1, 0))
    want = vector(math.exp(0.5) - 1 - 0.5, math.exp(-1) - 1 + 1, 0)
    torch.testing.assert_close(metrics["policy/kl_rollout"], want)
