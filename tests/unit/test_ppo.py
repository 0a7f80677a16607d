"""PPO: GAE, the clipped value loss, explained variance and the whole estimator against brute force in float64."""

import itertools
import math

import pytest
import torch

from rlpost.algorithms import build_algorithm
from rlpost.data.packing import pack
from rlpost.losses.advantage import discounted_returns, gae, token_rewards, whiten
from rlpost.losses.reduce import token_weights
from rlpost.losses.value import explained_variance, value_loss
from rlpost.policy.logits import Head
from rlpost.types import Prompt, Sample

F64 = {"dtype": torch.float64}


def gae_by_definition(rewards, values, mask, gamma, lam):
    """A_t = Σ_k (γλ)^k δ_{t+k} over live tokens, as the paper writes it."""
    live = [t for t, m in enumerate(mask) if m]
    r, v = [rewards[t] for t in live], [*(values[t] for t in live), 0.0]
    deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(live))]
    found = [0.0] * len(mask)
    for i, t in enumerate(live):
        found[t] = math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
    return found


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.0), (0.9, 1.0), (0.7, 0.5)])
@pytest.mark.parametrize("mask", [[1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 1], [0] * 6])
def test_gae_is_its_definition_over_live_tokens(mask, gamma, lam):
    random = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 6, generator=random, **F64)
    got = gae(rewards, values, torch.tensor(mask), gamma, lam)
    want = gae_by_definition(rewards.tolist(), values.tolist(), mask, gamma, lam)
    torch.testing.assert_close(got, torch.tensor(want, **F64))
    if lam == 1:  # telescopes: what was earned, minus the value
        returns = discounted_returns(rewards, torch.tensor(mask), gamma)
        torch.testing.assert_close(got, (returns - values) * torch.tensor(mask))


def test_what_tokens_earn():
    mask, kl = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0.5, math.nan, -1.0, math.nan])
    assert token_rewards(2.0, mask, kl, 0.1).tolist() == pytest.approx([-0.05, 0.0, 2.1, 0.0])
    assert token_rewards(2.0, mask).tolist() == [0, 0, 2, 0]
    assert token_rewards(2.0, torch.zeros(2)).tolist() == [0, 0]


VALUES = torch.tensor([0.0, 0.5, 1.0, 1.0, -0.3, 0.35], **F64)
OLD = torch.tensor([0.0, 0.0, 0.0, 1.5, 0.0, 0.3], **F64)
RETURNS = torch.tensor([1.0, 1.0, -1.0, 0.0, -1.0, 0.0], **F64)


def test_value_loss_by_hand():
    got, clipped = value_loss(VALUES, OLD, RETURNS)
    # 1: past the clip towards its return: (0.2 − 1)²; 2: away from it, so the plain term is the larger one; 3: the
    # former value 1.5 allows 1.3 … 1.7; 4: -0.3 is held at -0.2.
    want = torch.tensor([1.0, 0.64, 4.0, 1.69, 0.64, 0.1225], **F64) / 2
    torch.testing.assert_close(got, want)
    assert clipped.tolist() == [0, 1, 0, 1, 1, 0]
    plain, none = value_loss(VALUES, OLD, RETURNS, clip=None)
    torch.testing.assert_close(plain, (VALUES - RETURNS) ** 2 / 2)
    assert not none.any()


def test_value_loss_gradient():
    values = VALUES.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, OLD, RETURNS)[0], values)
    (gradient,) = torch.autograd.grad(value_loss(values, OLD, RETURNS)[0].sum(), values)
    clipped = value_loss(values, OLD, RETURNS)[1] > 0
    torch.testing.assert_close(gradient, (VALUES - RETURNS).masked_fill(clipped, 0.0))


def test_explained_variance_is_of_the_whole_step():
    values = [torch.tensor([0.5, 9.0, 0.1]), torch.tensor([0.9])]
    returns = [torch.tensor([1.0, 0.0, 0.2]), torch.tensor([0.5])]
    masks = [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0])]
    r, v = torch.tensor([1.0, 0.2, 0.5]).double(), torch.tensor([0.5, 0.1, 0.9]).double()
    want = float(1 - (r - v).var() / r.var())
    assert explained_variance(values, returns, masks) == pytest.approx(want, rel=1e-6)
    assert explained_variance(returns, returns, masks) == 1
    assert explained_variance([r + 7 for r in returns], returns, masks) == pytest.approx(1)  # an offset is no variance
    assert explained_variance(values, [torch.full_like(r, 0.3) for r in returns], masks) is None
    # Two ranks, one of them without a sample, call the sums alike.
    sums = []
    explained_variance(values, returns, masks, lambda x: sums.append(x.clone()) or x)
    rest = iter(sums)
    assert explained_variance([], [], [], lambda x: x + next(rest)) == pytest.approx(want, rel=1e-6)


def sample(symbols, index, reward, values):
    made = Sample(
        Prompt(0, [], [0]),
        group_id=0,
        index=index,
        response_ids=list(symbols),
        rollout_logprobs=[-1.0] * len(symbols),
        loss_mask=[1] * len(symbols),
        reward=float(reward),
    )
    made.tokens = {
        "values": torch.as_tensor(values, **F64),
        "loss_mask": torch.ones(len(symbols), **F64),
        "h": torch.zeros(len(symbols), 1 + VOCABULARY, **F64),
    }
    # A policy over two tokens: the second one's logits depend on the first.
    made.tokens["h"][0, 0] = 1
    made.tokens["h"][1, 1 + symbols[0]] = 1
    return made


VOCABULARY = 3
REWARD = torch.tensor([[0.0, 0.3, 1.0], [0.6, 0.1, 0.2], [0.9, 0.0, 0.4]], **F64)  # of two symbols


def exact_values(first, second):
    """V before either token, of the policy with these logits."""
    after = (second.softmax(1) * REWARD).sum(1)
    return first.softmax(0) @ after, after


@pytest.mark.parametrize(
    ("lam", "exact", "unbiased"), [(1.0, False, True), (1.0, True, True), (0.3, True, True), (0.3, False, False)]
)
def test_the_expected_update_is_the_gradient_of_the_expected_reward(lam, exact, unbiased):
    """Over every response of two tokens. λ = 1 is unbiased with any critic, a smaller λ with the exact values; with
    wrong values and λ < 1 it is not, which this test can tell."""
    random = torch.Generator().manual_seed(0)
    first, second = torch.randn(VOCABULARY, generator=random, **F64), torch.randn(3, 3, generator=random, **F64)
    weight = torch.cat([first[None], second]).t().contiguous().requires_grad_()  # [V, states]
    before, after = exact_values(first, second) if exact else (torch.tensor(0.2), torch.tensor([0.9, -0.5, 0.0]))
    algorithm = build_algorithm({"name": "ppo", "gae_lambda": lam, "whiten": False, "reduction": "sequence_sum"})
    update = torch.zeros_like(weight)
    for a, b in itertools.product(range(VOCABULARY), repeat=2):
        made = sample([a, b], 0, REWARD[a, b], [float(before), float(after[a])])
        algorithm.prepare([made])
        made.tokens["weights"] = token_weights([made.loss_mask], "sequence_sum")[0].double()
        algorithm.finish([made], lambda x: x)
        (micro,) = pack([made], 10**6)
        output = algorithm.loss(Head(micro.fields["h"], weight, vocab_size=VOCABULARY), micro)
        probability = first.softmax(0)[a] * second.softmax(1)[a, b]
        update -= probability * torch.autograd.grad((output.loss_N * micro.fields["weights"]).sum(), weight)[0]
    expected_reward = exact_values(weight[:, 0], weight[:, 1:].t())[0]
    (true_gradient,) = torch.autograd.grad(expected_reward, weight)
    same = torch.allclose(update, true_gradient, rtol=1e-5, atol=1e-7)
    assert same == unbiased


def test_finish_by_hand():
    """KL in what tokens earn, a tool's token skipped, whitening over both responses; returns are advantages before
    whitening plus values; the explained variance is of what was earned."""
    algorithm = build_algorithm({"name": "ppo", "kl_coef": 0.1, "gamma": 0.9, "gae_lambda": 0.8})
    samples = [sample([1, 2, 0], 0, 1.0, [0.4, math.pi, 0.6]), sample([0, 0], 1, 0.0, [0.3, 0.1])]
    samples[0].tokens["loss_mask"][1] = 0
    for made, reference in zip(samples, ([-1.5, math.nan, -1.5], [-1.0, -3.0])):
        made.tokens["old_logprobs"] = torch.full((len(reference),), -1.0, **F64)
        made.tokens["reference_logprobs"] = torch.tensor(reference, **F64)
    algorithm.prepare(samples)
    metrics = algorithm.finish(samples, lambda x: x)
    earned = [[-0.05, 0, 1.0 - 0.05], [0.0, -0.2]]
    masks = [s.tokens["loss_mask"] for s in samples]
    raw = [
        torch.tensor(gae_by_definition(e, s.tokens["values"].tolist(), m.tolist(), 0.9, 0.8), **F64)
        for e, s, m in zip(earned, samples, masks)
    ]
    for made, mask, advantages, white in zip(samples, masks, raw, whiten(raw, masks)):
        torch.testing.assert_close(made.tokens["advantages"], white, rtol=1e-6, atol=1e-7)
        returns = (made.tokens["returns"] - made.tokens["values"]) * mask
        torch.testing.assert_close(returns, advantages, rtol=1e-6, atol=1e-7)
    observed = torch.tensor([-0.05 + 0.9 * 0.95, 0.95, -0.18, -0.2], **F64)
    values = torch.tensor([0.4, 0.6, 0.3, 0.1], **F64)
    want = 1 - float((observed - values).var() / observed.var())
    assert metrics["critic/explained_variance"] == pytest.approx(want, rel=1e-5)


def test_the_loss_of_the_critic_reads_live_slots_alone():
    algorithm = build_algorithm({"name": "ppo", "value_clip": 0.1})
    made = sample([1, 2], 0, 1.0, [0.5, math.nan])
    made.tokens |= {"loss_mask": torch.tensor([1.0, 0.0]), "returns": torch.tensor([1.0, math.nan])}
    (micro,) = pack([made], 100)
    output = algorithm.value_loss(torch.tensor([0.7, 0.0]), micro)
    assert output.loss_N.tolist() == pytest.approx([0.4**2 / 2, 0.0])
    assert output.metrics["critic/clip_fraction"][0] == 1


def test_equal_rewards_are_a_signal():
    algorithm = build_algorithm({"name": "ppo"})
    samples = [sample([1, 2], i, 1.0, [0.5, 0.5]) for i in range(2)]
    algorithm.prepare(samples)
    assert algorithm.has_signal(samples) and not algorithm.group_relative
    samples[0].loss_mask = samples[1].loss_mask = [0, 0]
    assert not algorithm.has_signal(samples)


@pytest.mark.parametrize(
    ("cfg", "line"),
    [
        ({"gamma": 0}, "algorithm.gamma=0 is not allowed; it is a number above 0 and at most 1"),
        ({"gae_lambda": 1.1}, "algorithm.gae_lambda=1.1 is not allowed"),
        ({"value_clip": 0}, "algorithm.value_clip=0 is not allowed; it is a number above 0, or null"),
        ({"whiten": "yes"}, "algorithm.whiten=yes is not allowed"),
        ({"advantage": "grpo"}, "algorithm.advantage=grpo is not allowed; allowed are gae"),
    ],
    ids=str,
)
def test_wrong_fields(cfg, line):
    with pytest.raises(ValueError) as error:
        build_algorithm({"name": "ppo", **cfg})
    assert line in str(error.value)


def test_needs():
    assert build_algorithm({"name": "ppo"}).needs == {"rollout", "reward", "old_logprobs", "values"}
    with_kl = build_algorithm({"name": "ppo", "kl_coef": 0.1}).needs
    assert {"old_logprobs_always", "reference_logprobs", "values"} <= with_kl
