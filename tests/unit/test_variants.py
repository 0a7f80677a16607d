"""Every policy gradient by name: which way its expected update points, and what its numbers are by hand."""

import itertools

import pytest
import torch

from rlpost.algorithms import build_algorithm
from rlpost.data.packing import pack
from rlpost.losses.advantage import discounted_returns, whiten
from rlpost.losses.reduce import token_weights
from rlpost.policy.logits import Head
from rlpost.types import Prompt, Sample

REWARDS = torch.tensor([0.0, 0.2, 1.0, 0.5], dtype=torch.float64)  # of the bandit's four symbols
NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce", "reinforce_pp", "ppo")


def response(symbols, group, index, reward, **tokens):
    return Sample(
        Prompt(0, [], [0]),
        group_id=group,
        index=index,
        response_ids=list(symbols),
        rollout_logprobs=[-1.0] * len(symbols),
        loss_mask=[1] * len(symbols),
        reward=float(reward),
        tokens=tokens,
    )


def step_gradient(algorithm, samples, logits_V, old_logits_V=None):
    """d loss / d logits of a policy that draws every token from the same distribution."""
    algorithm.prepare(samples)
    masks = algorithm.loss_masks(samples)
    for sample, mask, weights in zip(samples, masks, token_weights(masks, algorithm.reduction, 2)):
        sample.tokens |= {"weights": weights.double(), "loss_mask": torch.tensor(mask).double()}
        sample.tokens["h"] = torch.ones(len(mask), 1, dtype=torch.float64)
        sample.tokens["values"] = torch.full((len(mask),), 0.3, dtype=torch.float64)  # of a critic, where one is needed
        if old_logits_V is not None:
            sample.tokens["old_logprobs"] = old_logits_V.log_softmax(0)[sample.response_ids]
    algorithm.finish(samples, lambda x: x)
    if not algorithm.has_signal(samples):
        return torch.zeros_like(logits_V)
    weight_V1 = logits_V[:, None].clone().requires_grad_()
    (micro,) = pack(samples, 10**6)
    output = algorithm.loss(Head(micro.fields["h"], weight_V1, vocab_size=len(logits_V)), micro)
    return torch.autograd.grad((output.loss_N * micro.fields["weights"]).sum(), weight_V1)[0][:, 0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("moved", [False, True], ids=["on-policy", "second update"])
def test_the_expected_update_raises_the_expected_reward(name, moved):
    """Over every group of two one-token responses, weighted by its probability."""
    logits = torch.tensor([0.5, 0.0, -0.5, 0.2], dtype=torch.float64)
    inside = min(0.05, build_algorithm({"name": name}).clip_low / 2)  # the clip range
    old = logits + inside * torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64) if moved else None
    behaviour = (logits if old is None else old).softmax(0)
    update = torch.zeros_like(logits)
    for a, b in itertools.product(range(4), repeat=2):
        algorithm = build_algorithm({"name": name})
        if name == "reinforce":
            algorithm.baseline.value = 0.3
        samples = [response([a], 0, 0, REWARDS[a]), response([b], 0, 1, REWARDS[b])]
        update -= behaviour[a] * behaviour[b] * step_gradient(algorithm, samples, logits, old)
    p = logits.softmax(0)
    true_gradient = p * (REWARDS - p @ REWARDS)
    assert update @ true_gradient > 0
    assert update[0] < 0 < update[2]
    if name in ("rloo", "reinforce") and not moved:  # unbiased, not only of the right sign
        torch.testing.assert_close(update, true_gradient, rtol=1e-5, atol=1e-8)


def test_variants_are_their_papers_choices():
    dapo, dr, gspo = (build_algorithm({"name": name}) for name in ("dapo", "dr_grpo", "gspo"))
    assert (dapo.clip_low, dapo.clip_high, dapo.reduction) == (0.2, 0.28, "token_mean")
    assert (dr.reduction, dr.normalize_std) == ("constant", False)
    assert (gspo.policy_loss, gspo.clip_low, gspo.clip_high) == ("gspo", 3e-4, 4e-4)
    assert build_algorithm({"name": "dapo", "clip_high": 0.3}).clip_high == 0.3


def test_returns_skip_masked_tokens():
    rewards, mask = torch.tensor([0.0, 9.0, 1.0, 2.0, 9.0]), torch.tensor([1, 0, 1, 1, 0])
    assert discounted_returns(rewards, mask, 0.5).tolist() == [0 + 0.5 * (1 + 0.5 * 2), 0, 1 + 0.5 * 2, 2, 0]


def test_whitening_is_of_the_whole_step():
    values = [torch.tensor([1.0, 2.0, 50.0]), torch.tensor([4.0])]
    masks = [torch.tensor([1, 1, 0]), torch.tensor([1])]
    live = torch.tensor([1.0, 2.0, 4.0])
    white = (live - live.mean()) / live.std()
    got = whiten(values, masks)
    torch.testing.assert_close(torch.cat(got), torch.tensor([*white[:2], 0.0, white[2]]))
    # A rank that holds the second response alone: what the first one adds to the two sums comes from elsewhere.
    elsewhere = iter([torch.tensor([2.0, 3.0]), (live[:2] - live.mean()).square().sum()])
    (half,) = whiten(values[1:], masks[1:], lambda x: x + next(elsewhere))
    torch.testing.assert_close(half, got[1])


@pytest.mark.parametrize("advantage", ["reinforce_pp", "reinforce_pp_baseline"])
def test_reinforce_pp_by_hand(advantage):
    algorithm = build_algorithm({"name": "reinforce_pp", "advantage": advantage, "kl_coef": 0.1, "gamma": 0.9})
    assert "old_logprobs_always" in algorithm.needs and algorithm.group_relative == (advantage != "reinforce_pp")
    samples = [response([1, 2, 3], 0, 0, 1.0), response([0, 0], 0, 1, 0.0), response([1], 1, 0, 0.5)]
    samples[0].loss_mask = [1, 0, 1]
    algorithm.prepare(samples)
    for i, sample in enumerate(samples):
        n = len(sample.response_ids)
        sample.tokens["loss_mask"] = torch.tensor(sample.loss_mask).float()
        sample.tokens["old_logprobs"] = -torch.arange(1.0, n + 1)
        sample.tokens["reference_logprobs"] = -torch.arange(1.0, n + 1) - 0.5 * (i + 1)  # k1 = 0.5 (i + 1)
        sample.tokens["reference_logprobs"][sample.tokens["loss_mask"] == 0] = torch.nan
    algorithm.finish(samples, lambda x: x)
    kl = [0.05, 0.1, 0.15]
    if advantage == "reinforce_pp":
        last = [1.0 - kl[0], -kl[1], 0.5 - kl[2]]
        raw = [-kl[0] + 0.9 * last[0], last[0], -kl[1] + 0.9 * last[1], last[1], last[2]]
    else:
        raw = [0.5 - kl[0], 0.5 - kl[0], -0.5 - kl[1], -0.5 - kl[1], -kl[2]]
    raw = torch.tensor(raw)
    want = (raw - raw.mean()) / raw.std()
    got = torch.cat([s.tokens["advantages"][s.tokens["loss_mask"] > 0] for s in samples])
    torch.testing.assert_close(got, want)
    assert samples[0].tokens["advantages"][1] == 0


def test_reinforce_pp_without_a_signal():
    algorithm = build_algorithm({"name": "reinforce_pp"})
    samples = [response([1], 0, 0, 0.5), response([0], 1, 0, 0.5)]
    algorithm.prepare(samples)
    assert not algorithm.has_signal(samples)
    samples[0].reward = 1.0
    algorithm.prepare(samples)
    assert algorithm.has_signal(samples[1:])  # whitened over the step, this one has an advantage too


def half_clip(logp_N, old_N, advantages_N, micro):
    return -0.5 * advantages_N * logp_N, torch.zeros_like(logp_N)


def best_of_group(rewards_B, group_ids_B):
    top = {g: max(r for r, h in zip(rewards_B, group_ids_B) if h == g) for g in group_ids_B}
    return [float(r == top[g]) for r, g in zip(rewards_B, group_ids_B)]


@pytest.mark.parametrize("by", ["object", "import path"])
def test_an_advantage_and_a_loss_of_ones_own(by, monkeypatch):
    monkeypatch.syspath_prepend(str(__import__("pathlib").Path(__file__).parent))
    chosen = {"advantage": best_of_group, "policy_loss": half_clip}
    if by == "import path":
        chosen = {key: f"test_variants.{fn.__name__}" for key, fn in chosen.items()}
    algorithm = build_algorithm({"name": "grpo", "reduction": "sequence_sum", **chosen})
    assert not algorithm.group_relative
    logits = torch.zeros(4, dtype=torch.float64)
    gradient = step_gradient(algorithm, [response([2], 0, 0, 1.0), response([1], 0, 1, 0.0)], logits)
    one = torch.eye(4, dtype=torch.float64)[2]
    torch.testing.assert_close(gradient, 0.5 * 0.5 * (logits.softmax(0) - one))


def test_a_function_that_does_not_exist_is_said():
    with pytest.raises(ValueError) as error:
        build_algorithm({"name": "grpo", "advantage": "rlpost.losses.advantage.nothing", "policy_loss": "ppo"})
    assert "algorithm.advantage=rlpost.losses.advantage.nothing is not allowed; " in str(error.value)
    assert "algorithm.policy_loss=ppo is not allowed; allowed are ppo_clip" in str(error.value)
