"""Distillation losses against the published vectors (float64, 6 digits) and their invariants."""

import pytest
import torch

from rlpost.losses.distill import (
    close_tail,
    divergence,
    is_clip_weights,
    renormalize,
    sampled_loss,
    with_tail_bucket,
)
from rlpost.policy.logits import Head, HiddenTargets

STUDENT = [[2.0, 1, 0, -1, -2], [0, 0, 0, 0, 0], [1, 3, -1, 0.5, 0]]
TEACHER = [[0.0, 2, 1, -1, -2], [3, 0, 0, 0, 0], [1, 3, -1, 0.5, 0]]
SAMPLED = torch.tensor([1, 0, 3])
SIX_DIGITS = {"atol": 6e-7, "rtol": 0}


def log_softmaxes():
    z = torch.tensor(STUDENT, dtype=torch.float64, requires_grad=True)
    return z, z.log_softmax(-1), torch.tensor(TEACHER, dtype=torch.float64).log_softmax(-1)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("alpha", "want"),
    [
        (0.0, (0.698273, 0.929602, 0)),
        (0.25, (0.132452, 0.164836, 0)),
        (0.5, (0.184484, 0.217567, 0)),
        (1.0, (0.952567, 0.972174, 0)),
    ],
)
def test_full_divergences(alpha, want):
    z, S, Q = log_softmaxes()
    torch.testing.assert_close(divergence(S, Q, alpha), vector(*want), **SIX_DIGITS)
    # The streamed head computes the same from hidden states (here: the logits, and an identity for a head).
    eye, q = torch.eye(5, dtype=torch.float64), vector(*TEACHER[0]).new_tensor(TEACHER)
    targets = HiddenTargets(q, q.logsumexp(-1), eye, 5)
    torch.testing.assert_close(Head(z, eye, vocab_size=5).divergence(targets, alpha)[0], vector(*want), **SIX_DIGITS)


@pytest.mark.parametrize(
    ("tail", "alpha", "want"),
    [
        ("bucket", 0.0, 0.675645),
        ("bucket", 0.5, 0.180488),
        ("bucket", 1.0, 0.940009),
        ("renormalize", 0.0, 0.828725),
        ("renormalize", 0.5, 0.208126),
        ("renormalize", 1.0, 1.006842),
    ],
)
def test_top_2_of_the_student(tail, alpha, want):
    _, S, Q = log_softmaxes()
    ids = S.topk(2).indices
    value = divergence(close_tail(S.gather(1, ids), tail), close_tail(Q.gather(1, ids), tail), alpha)
    torch.testing.assert_close(value[[0, 2]], vector(want, 0), **SIX_DIGITS)


def test_sampled_token():
    _, S, Q = log_softmaxes()
    logp, teacher = (x.gather(1, SAMPLED[:, None])[:, 0] for x in (S, Q))
    torch.testing.assert_close(sampled_loss(logp, teacher), vector(1.451914, 2.297998, 0), **SIX_DIGITS)


def test_is_clip_and_reductions():
    _, S, Q = log_softmaxes()
    logp = S.gather(1, SAMPLED[:, None])[:, 0]
    weights = is_clip_weights(logp, logp - vector(3, 0.5, 1).log(), 2.0)
    value = divergence(S, Q, 1.0)
    torch.testing.assert_close(value * weights, vector(1.905134, 0.486087, 0), **SIX_DIGITS)
    assert not weights.requires_grad
    torch.testing.assert_close(value.sum(), vector(1.924741)[0], **SIX_DIGITS)
    torch.testing.assert_close(value.mean(), vector(0.641580)[0], **SIX_DIGITS)


def reverse(S, Q):
    return divergence(S, Q, 1.0)


def forward(S, Q):
    return divergence(S, Q, 0.0)


def jsd(S, Q):
    return divergence(S, Q, 0.5)


def jsd_top_2(S, Q):
    ids = S.topk(2).indices
    return divergence(with_tail_bucket(S.gather(1, ids)), with_tail_bucket(Q.gather(1, ids)), 0.5)


def sampled(S, Q):
    return sampled_loss(*(x.gather(1, SAMPLED[:, None])[:, 0] for x in (S, Q)))


@pytest.mark.parametrize(
    ("loss", "want"),
    [
        (reverse, (0.666595, -0.457138, -0.168172, -0.030182, -0.011103)),
        (forward, (0.550280, -0.402287, -0.147993, 0, 0)),
        (jsd, (0.128702, -0.091526, -0.033671, -0.002563, -0.000943)),
        (jsd_top_2, (0.130331, -0.090927, -0.026213, -0.009643, -0.003548)),
        (sampled, (0.636409, -0.765878, 0.086129, 0.031685, 0.011656)),
    ],
)
def test_gradients_to_the_students_logits(loss, want):
    z, S, Q = log_softmaxes()
    (grad,) = torch.autograd.grad(loss(S, Q).sum(), z)
    torch.testing.assert_close(grad[0], vector(*want), **SIX_DIGITS)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_finite_differences(alpha):
    z, _, Q = log_softmaxes()
    noise = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = (z.detach() + noise).requires_grad_()
    ids = z.topk(3).indices
    for side in (with_tail_bucket, renormalize, lambda x: x.log_softmax(-1)):
        assert torch.autograd.gradcheck(
            lambda z, side=side: divergence(side(z.log_softmax(-1).gather(1, ids)), side(Q.gather(1, ids)), alpha),
            (z,),
        )


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_bucket_of_the_whole_vocabulary_changes_nothing(alpha):
    _, S, Q = log_softmaxes()
    full = divergence(S, Q, alpha)
    torch.testing.assert_close(divergence(with_tail_bucket(S), with_tail_bucket(Q), alpha), full)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_never_negative_in_fp32(alpha, tail):
    g = torch.Generator().manual_seed(0)
    z = torch.randn(200, 50, generator=g) * 4
    S, Q = z.log_softmax(-1), (z + 1e-4 * torch.randn(z.shape, generator=g)).log_softmax(-1)
    for k in (1, 7, 50):
        ids = S.topk(k).indices
        value = divergence(close_tail(S.gather(1, ids), tail), close_tail(Q.gather(1, ids), tail), alpha)
        assert (value >= 0).all()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_ids_that_are_absent_on_both_sides_count_nothing(alpha, tail):
    z, S, Q = log_softmaxes()
    gap = torch.full((3, 1), -torch.inf, dtype=torch.float64)
    short = divergence(close_tail(S[:, :3], tail), close_tail(Q[:, :3], tail), alpha)
    padded = [torch.cat([x[:, :3], gap], dim=1) for x in (S, Q)]
    long = divergence(close_tail(padded[0], tail), close_tail(padded[1], tail), alpha)
    torch.testing.assert_close(long, short)
    a, b = (torch.autograd.grad(x.sum(), z, retain_graph=True)[0] for x in (short, long))
    torch.testing.assert_close(a, b)


def test_a_teacher_that_rules_an_id_out_gives_a_finite_loss():
    z, S, Q = log_softmaxes()
    loss = divergence(S, Q.masked_fill(torch.arange(5) == 0, -torch.inf), 1.0).sum()
    (grad,) = torch.autograd.grad(loss, z)
    assert loss.isfinite() and grad.isfinite().all() and grad[0, 0] > 0


def test_the_teacher_gets_no_gradient():
    _, S, Q = log_softmaxes()
    Q.requires_grad_()
    for alpha in (0.0, 0.5, 1.0):
        assert torch.autograd.grad(divergence(S, Q, alpha).sum(), Q, retain_graph=True, allow_unused=True) == (None,)


def test_what_is_not_allowed_is_named():
    _, S, Q = log_softmaxes()
    with pytest.raises(ValueError, match=r"alpha=1.5"):
        divergence(S, Q, 1.5)
    with pytest.raises(ValueError, match="tail='cut': must be one of bucket, renormalize"):
        close_tail(S, "cut")
