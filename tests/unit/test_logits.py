"""The streamed head against dense autograd: values, gradients, tiles, padding, memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rlpost.policy.logits import Head, HiddenTargets

N, H, V, PADDED, K = 37, 16, 203, 224, 5


def problem(dtype=torch.float64, seed=0, n=N):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, H, generator=g, dtype=torch.float64)
    weight[V:] = 30.0  # padded rows that would win every softmax
    weight = weight.to(dtype).requires_grad_()
    ids = torch.randint(0, V, (n,), generator=g)
    extra = torch.randint(0, V, (n, 3), generator=g)
    return hidden, weight, ids, extra


def dense_logprobs(hidden, weight, temperature):
    return F.log_softmax((hidden.double() @ weight.double().t())[:, :V] / temperature, dim=-1)


def grads(loss, *inputs):
    return torch.autograd.grad(loss, inputs, allow_unused=True)


def dense_divergence(S, Q, alpha):
    if alpha == 0:
        return (Q.exp() * (Q - S)).sum(-1)
    if alpha == 1:
        return (S.exp() * (S - Q)).sum(-1)
    log_m = ((1 - alpha) * S.exp() + alpha * Q.exp()).log()
    return (1 - alpha) * (S.exp() * (S - log_m)).sum(-1) + alpha * (Q.exp() * (Q - log_m)).sum(-1)


TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    # The factors of the backward's matmuls, dz and hidden, are rounded to 2^-9.
    torch.bfloat16: 2e-2,
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("chunk_tokens", [0, 1, 7])
def test_logprobs_topk_entropy_equal_dense(dtype, chunk_tokens):
    hidden, weight, ids, extra = problem(dtype)
    head = Head(hidden, weight, temperature=0.7, vocab_size=V, chunk_tokens=chunk_tokens)
    out = head.logprobs(ids, top_k=K, extra_ids_NK=extra, entropy=True)

    dense = dense_logprobs(hidden, weight, 0.7)
    top, top_ids = dense.topk(K, dim=-1)
    entropy = -(dense.exp() * dense).sum(-1)
    # Log-probs are not rounded to bf16: products of bf16 factors are exact in fp32.
    value = {"atol": 1e-10 if dtype == torch.float64 else 2e-5, "rtol": 0}
    torch.testing.assert_close(out.logprobs_N.double(), dense.gather(1, ids[:, None])[:, 0], **value)
    torch.testing.assert_close(out.extra_logprobs_NK.double(), dense.gather(1, extra), **value)
    torch.testing.assert_close(out.topk_logprobs_NK.double(), top, **value)
    assert torch.equal(out.topk_ids_NK, top_ids)
    torch.testing.assert_close(out.entropy_N.double(), entropy, **value)

    g = torch.Generator().manual_seed(1)
    wp, we, wt, wx = (torch.randn(s, generator=g).double() for s in (N, N, (N, K), (N, 3)))
    mine = (out.logprobs_N * wp).sum() + (out.entropy_N * we).sum()
    mine = mine + (out.topk_logprobs_NK * wt).sum() + (out.extra_logprobs_NK * wx).sum()
    oracle = (dense.gather(1, ids[:, None])[:, 0] * wp).sum() + (entropy * we).sum()
    oracle = oracle + (top * wt).sum() + (dense.gather(1, extra) * wx).sum()
    d_hidden, d_weight = grads(mine, hidden, weight)
    for got, want in zip((d_hidden, d_weight), grads(oracle, hidden, weight)):
        scale = want.abs().max().double()
        torch.testing.assert_close(got.double() / scale, want.double() / scale, atol=TOLERANCE[dtype], rtol=0)
    assert torch.equal(d_weight[V:], torch.zeros_like(d_weight[V:]))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("chunk_tokens", [0, 2])
def test_divergence_equals_dense(dtype, alpha, chunk_tokens):
    hidden, weight, _, _ = problem(dtype)
    t_hidden, t_weight, _, _ = problem(dtype, seed=5)
    t_hidden, t_weight = t_hidden.detach(), t_weight.detach()
    t_lse = Head(t_hidden, t_weight, temperature=1.3, vocab_size=V).lse_N
    teacher = HiddenTargets(t_hidden, t_lse, t_weight, V, temperature=1.3)
    head = Head(hidden, weight, temperature=1.3, vocab_size=V, chunk_tokens=chunk_tokens)
    value, kl = head.divergence(teacher, alpha)
    assert value.requires_grad and not kl.requires_grad

    S, Q = dense_logprobs(hidden, weight, 1.3), dense_logprobs(t_hidden, t_weight, 1.3)
    oracle = dense_divergence(S, Q, alpha)
    close = {"atol": 1e-10 if dtype == torch.float64 else 3e-5, "rtol": 1e-5}
    torch.testing.assert_close(value.double(), oracle, **close)
    torch.testing.assert_close(kl.double(), dense_divergence(S, Q, 0).detach(), **close)
    w = torch.linspace(-1, 2, N).double()
    for got, want in zip(grads((value * w).sum(), hidden, weight), grads((oracle * w).sum(), hidden, weight)):
        scale = want.abs().max().double()
        torch.testing.assert_close(got.double() / scale, want.double() / scale, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_student_equal_to_its_teacher_has_no_divergence(alpha):
    hidden, weight, _, _ = problem(torch.float32)
    head = Head(hidden, weight, vocab_size=V)
    value, _ = head.divergence(HiddenTargets(hidden.detach(), head.lse_N, weight.detach(), V), alpha)
    assert (value >= 0).all() and value.max() < 1e-6
    d_hidden, d_weight = grads(value.sum(), hidden, weight)
    assert d_hidden.abs().max() < 1e-5 and d_weight.abs().max() < 1e-5


def test_a_teacher_with_another_hidden_size():
    hidden, weight, _, _ = problem()
    g = torch.Generator().manual_seed(3)
    t_hidden, t_weight = (torch.randn(n, 9, generator=g, dtype=torch.float64) for n in (N, PADDED))
    teacher = HiddenTargets(t_hidden, Head(t_hidden, t_weight, vocab_size=V).lse_N, t_weight, V)
    value, _ = Head(hidden, weight, vocab_size=V, chunk_tokens=3).divergence(teacher, 1.0)
    torch.testing.assert_close(
        value, dense_divergence(dense_logprobs(hidden, weight, 1), dense_logprobs(t_hidden, t_weight, 1), 1)
    )


def test_hidden_targets_at_any_ids():
    hidden, weight, _, extra = problem()
    head = Head(hidden, weight, temperature=0.5, vocab_size=V)
    teacher = HiddenTargets(hidden.detach(), head.lse_N, weight.detach(), V, temperature=0.5)
    torch.testing.assert_close(teacher.logprobs_at(extra), dense_logprobs(hidden, weight, 0.5).gather(1, extra))


def test_the_whole_vocabulary_as_top_k():
    hidden, weight, ids, _ = problem()
    out = Head(hidden, weight, vocab_size=V, chunk_tokens=2).logprobs(ids, top_k=V)
    assert torch.equal(out.topk_ids_NK.sort(dim=1).values, torch.arange(V).expand(N, V))
    torch.testing.assert_close(out.topk_logprobs_NK.exp().sum(1), torch.ones(N, dtype=torch.float64))


def test_top_k_across_tiles():
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 8, generator=g), torch.randn(4001, 8, generator=g)
    head = Head(hidden, weight, vocab_size=4001, chunk_tokens=1)
    out = head.logprobs(torch.zeros(9, dtype=torch.int64), top_k=4)
    assert torch.equal(out.topk_ids_NK, (hidden @ weight.t()).topk(4, dim=1).indices)


def test_extreme_logits_stay_finite():
    hidden, weight, ids, _ = problem(torch.float32)
    out = Head(hidden * 1e3, weight, vocab_size=V, chunk_tokens=1).logprobs(ids, entropy=True)
    dense = F.log_softmax(((hidden * 1e3) @ weight.t())[:, :V], dim=-1)
    torch.testing.assert_close(out.logprobs_N, dense.gather(1, ids[:, None])[:, 0], rtol=1e-4, atol=1e-2)
    assert out.entropy_N.isfinite().all()


def test_rows_without_upstream_gradient_get_exactly_zero():
    hidden, weight, ids, _ = problem(torch.float32)
    mask = (torch.arange(N) % 3 == 0).float()
    out = Head(hidden, weight, vocab_size=V).logprobs(ids)
    d_hidden, d_weight = grads((out.logprobs_N * mask).sum(), hidden, weight)
    assert torch.equal(d_hidden[mask == 0], torch.zeros_like(d_hidden[mask == 0]))
    alone = Head(hidden[mask == 1], weight, vocab_size=V).logprobs(ids[mask == 1])
    want_hidden, want_weight = grads(alone.logprobs_N.sum(), hidden, weight)
    torch.testing.assert_close((d_hidden, d_weight), (want_hidden, want_weight))


@pytest.mark.parametrize("n", [0, 3])
def test_a_micro_batch_without_a_live_token_still_reaches_the_weights(n):
    hidden, weight, ids, _ = problem(torch.float32, n=n)
    out = Head(hidden, weight, vocab_size=V).logprobs(ids, top_k=2, entropy=True)
    d_hidden, d_weight = grads(out.logprobs_N.sum() * 0 + out.entropy_N.sum() * 0, hidden, weight)
    assert torch.equal(d_weight, torch.zeros_like(weight)) and torch.equal(d_hidden, torch.zeros_like(hidden))


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, ids, _ = problem()
    out = Head(hidden, weight.detach(), vocab_size=V).logprobs(ids)
    out.logprobs_N.sum().backward()
    assert hidden.grad is not None and weight.grad is None


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("chunk_tokens", [0, 7])
def test_the_weights_gradient_added_to_a_sum(dtype, chunk_tokens):
    hidden, weight, ids, _ = problem(dtype)
    mask = (torch.arange(N) % 3 > 0).double()

    def backward(**settings):
        head = Head(hidden, weight, vocab_size=V, temperature=0.7, chunk_tokens=chunk_tokens, **settings)
        out = head.logprobs(ids, entropy=True)
        return grads(((out.logprobs_N + out.entropy_N) * mask).sum(), hidden, weight)

    d_hidden, d_weight = backward()
    total = torch.ones(PADDED, H, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    summed_hidden, nothing = backward(weight_grad_VH=total)
    assert (
        nothing is None and torch.equal(summed_hidden, d_hidden) and torch.equal(total[V:], torch.ones(PADDED - V, H))
    )
    scale = d_weight.abs().max().double()
    torch.testing.assert_close((total - 1).double() / scale, d_weight.double() / scale, atol=TOLERANCE[dtype], rtol=0)


def test_rows_without_upstream_gradient_may_run_too():
    hidden, weight, ids, _ = problem()
    mask = (torch.arange(N) % 3 > 0).double()
    skipped, all_run = (
        grads(
            (Head(hidden, weight, vocab_size=V, skip_rows=skip).logprobs(ids).logprobs_N * mask).sum(), hidden, weight
        )
        for skip in (True, False)
    )
    assert torch.equal(all_run[0][mask == 0], torch.zeros(int((mask == 0).sum()), H))
    for got, want in zip(all_run, skipped):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_gradcheck():
    hidden, weight, ids, extra = problem(n=3)
    teacher = HiddenTargets(*(x.detach().clone() for x in (hidden.flip(0), torch.zeros(3).double(), weight)), V)
    teacher.lse_N = Head(teacher.hidden_NH, teacher.weight_VH, vocab_size=V).lse_N

    def f(hidden, weight):
        head = Head(hidden, torch.cat([weight, weight.new_zeros(PADDED - V, H)]), vocab_size=V, chunk_tokens=1)
        out = head.logprobs(ids, extra_ids_NK=extra, entropy=True)
        return (
            out.logprobs_N,
            out.extra_logprobs_NK,
            out.entropy_N,
            *(head.divergence(teacher, a)[0] for a in (0, 0.3, 1)),
        )

    small = weight.detach()[:V].requires_grad_()
    assert torch.autograd.gradcheck(f, (hidden, small), fast_mode=True)


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_no_tensor_of_tokens_by_vocabulary_is_ever_stored():
    n, v = 64, 6000
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, 4, generator=g).requires_grad_()
    weight = torch.randn(v, 4, generator=g).requires_grad_()
    ids = torch.randint(0, v, (n,), generator=g)
    with LargestTensor() as largest:
        head = Head(hidden, weight, vocab_size=v, chunk_tokens=8)
        out = head.logprobs(ids, top_k=4, entropy=True)
        teacher = HiddenTargets(hidden.detach().flip(0), out.lse_N.flip(0), weight.detach(), v)
        value = head.divergence(teacher, 0.5)[0] + out.logprobs_N + out.entropy_N + out.topk_logprobs_NK.sum(1)
        value.sum().backward()
    assert largest.numel <= 8 * v < n * v


def test_nothing_is_saved_without_grad():
    hidden, weight, ids, _ = problem()
    with torch.no_grad():
        out = Head(hidden, weight, vocab_size=V).logprobs(ids, top_k=3, entropy=True)
    assert out.logprobs_N.grad_fn is None and not out.logprobs_N.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"vocab_size": PADDED + 1}, f"vocab_size={PADDED + 1}"),
        ({"weight_VH": torch.zeros(4, H + 1)}, "hidden"),
    ],
)
def test_wrong_heads_say_what_is_wrong(change, message):
    hidden, weight, _, _ = problem()
    with pytest.raises(ValueError, match=message):
        Head(**{"hidden_NH": hidden, "weight_VH": weight, "vocab_size": V} | change)


def test_ids_outside_the_vocabulary_are_refused():
    hidden, weight, ids, _ = problem()
    with pytest.raises(ValueError, match=f"must lie in 0 … {V - 1}"):
        Head(hidden, weight, vocab_size=V).logprobs(torch.full_like(ids, V))
    with pytest.raises(ValueError, match="top_k"):
        Head(hidden, weight, vocab_size=V).logprobs(ids, top_k=V + 1)
