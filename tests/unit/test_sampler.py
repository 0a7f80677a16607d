"""Samples from prompts: shares, seeds, masks; and the distribution that tokens are drawn from."""

import pytest
import torch
from tiny_tokenizer import tiny_tokenizer

from rlpost.config.schema import RolloutConfig
from rlpost.rollout.engine import Completion, SamplingParams
from rlpost.rollout.engines.sampling import SamplingTable, sample_tokens
from rlpost.rollout.sampler import Sampler, group_id, rollout_metrics, sample_seed
from rlpost.types import Prompt

PROMPTS = [Prompt(id=i % 4, messages=[], ids=[i + 1, 2]) for i in range(5)]  # row 0 is drawn twice


class EchoEngine:
    """Answers with the prompt; what it was asked stays in `requests`."""

    def __init__(self, finish_reason="stop"):
        self.requests, self.finish_reason = [], finish_reason

    def generate(self, requests):
        self.requests += requests
        return [Completion(list(r.prompt_ids), [-0.5] * len(r.prompt_ids), self.finish_reason, 7) for r in requests]


def sampler(engine, *, rank=0, ranks=1, engine_ranks=1, seed=0, **rollout):
    ranks = {"rank": rank, "ranks": ranks, "engine_ranks": engine_ranks}
    return Sampler(engine, tiny_tokenizer(), RolloutConfig(**rollout), seed=seed, **ranks)


def test_shares_cover_all_prompts_once_and_seeds_do_not_depend_on_them():
    alone = EchoEngine()
    whole = sampler(alone).sample(PROMPTS, step=3)
    assert [(s.group_id, s.index) for s in whole] == [(group_id(3, p), i) for p in range(5) for i in range(4)]
    for ranks in (2, 3, 8):
        engines = [EchoEngine() for _ in range(ranks)]
        parts = [sampler(e, rank=k, ranks=ranks).sample(PROMPTS, step=3) for k, e in enumerate(engines)]
        assert [(s.group_id, s.index) for part in parts for s in part] == [(s.group_id, s.index) for s in whole]
        assert [r.seed for e in engines for r in e.requests] == [r.seed for r in alone.requests]
        assert max(map(len, parts)) - min(map(len, parts)) <= 4  # one prompt


@pytest.mark.parametrize(("ranks", "engine_ranks"), [(2, 2), (4, 2), (6, 3)])
def test_ranks_of_one_engine_ask_for_the_same_and_share_what_it_gives(ranks, engine_ranks):
    whole = sampler(EchoEngine()).sample(PROMPTS, step=3)
    engines = [EchoEngine() for _ in range(ranks)]
    samplers = [sampler(e, rank=k, ranks=ranks, engine_ranks=engine_ranks) for k, e in enumerate(engines)]
    parts = [one.sample(PROMPTS, step=3) for one in samplers]
    for k, engine in enumerate(engines):
        assert engine.requests == engines[k // engine_ranks * engine_ranks].requests
    found = [(s.group_id, s.index) for part in parts for s in part]
    assert sorted(found) == sorted((s.group_id, s.index) for s in whole)
    ranks_of = [{s.group_id for s in part} for part in parts]
    assert sum(map(len, ranks_of)) == len(PROMPTS), "a group stays on one rank, whose feedback looks at all of it"


def test_every_sample_of_a_run_has_a_seed_of_its_own():
    seeds = set()
    for seed in (0, 1):
        for stream in ("train", "eval/a"):
            for step in (0, 1):
                engine = EchoEngine()
                sampler(engine, seed=seed).sample(PROMPTS, step, stream=stream)
                seeds |= {r.seed for r in engine.requests}
    assert len(seeds) == 2 * 2 * 2 * 5 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, "train", 1, 2, 3, 4) == 2507833741395962576  # the same in every process and release


def test_samples_carry_what_the_engine_said():
    tokenizer = tiny_tokenizer()
    ids = [*tokenizer.encode("ab", add_special_tokens=False), tokenizer.eos_token_id]
    sample = sampler(EchoEngine()).sample([Prompt(0, [], ids)], 0, n=1)[0]
    assert sample.response == "ab" and sample.response_ids == ids
    assert sample.rollout_logprobs == [-0.5] * 3 and sample.loss_mask == [1, 1, 1]
    assert (sample.finish_reason, sample.version) == ("stop", 7)


def test_truncated_samples_leave_the_loss_only_where_asked():
    for mask_truncated, reason, expected in [(True, "length", 0), (False, "length", 1), (True, "stop", 1)]:
        samples = sampler(EchoEngine(reason), mask_truncated=mask_truncated).sample(PROMPTS, 0)
        assert all(s.loss_mask == [expected] * 2 for s in samples)


def test_eval_sampling_takes_its_own_number_and_parameters():
    engine, params = EchoEngine(), SamplingParams(9, temperature=0.2)
    samples = sampler(engine, temperature=0.9, top_k=4, stop_token_ids=[5]).sample(PROMPTS, 0, n=2, params=params)
    assert len(samples) == 10 and all(r.params is params for r in engine.requests)
    assert sampler(engine, temperature=0.9, top_k=4, stop_token_ids=[5]).params == SamplingParams(
        256, temperature=0.9, top_k=4, stop_token_ids=(5,)
    )


def test_metrics_are_pooled_and_rewards_only_where_all_are_judged():
    samples = sampler(EchoEngine("length")).sample(PROMPTS, 0, n=2)
    samples[0].finish_reason, samples[0].response_ids = "stop", [1, 2, 3, 4]
    metrics = rollout_metrics(samples)
    assert metrics["rollout/truncated_fraction"] == pytest.approx(0.9)
    assert metrics["rollout/response_tokens/mean"] == pytest.approx(2.2)
    assert metrics["rollout/response_tokens/max"] == 4
    assert not any(name.startswith("rollout/reward") for name in metrics)
    for i, sample in enumerate(samples):
        sample.reward = float(i == 0)
    metrics = rollout_metrics(samples)
    assert metrics["rollout/reward/mean"] == pytest.approx(0.1)
    assert metrics["rollout/reward/std"] == pytest.approx(0.3)
    assert metrics["rollout/equal_reward_groups"] == pytest.approx(0.8)
    assert rollout_metrics([]) == {}


def allowed_distribution(logits, params):
    """Brute force in fp64: temperature, then a token stays if it is among the top_k and in the nucleus."""
    probs = (logits.double() / params.temperature).softmax(-1)
    order = probs.argsort(descending=True, stable=True)
    kept, mass = [], 0.0
    for rank, token in enumerate(order.tolist()):
        if mass < params.top_p and (params.top_k == -1 or rank < params.top_k):
            kept.append(token)
        mass += probs[token].item()
    cut = torch.zeros_like(probs)
    cut[kept] = probs[kept]
    return cut / cut.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1),
        SamplingParams(1, temperature=0.6),
        SamplingParams(1, top_k=7),
        SamplingParams(1, top_p=0.8),
        SamplingParams(1, temperature=1.5, top_p=0.95, top_k=600),
        SamplingParams(1, top_p=1e-6),
        SamplingParams(1, temperature=40.0, top_p=0.99),  # flat: the search for the nucleus must widen
    ],
)
def test_tokens_follow_the_cut_distribution(params):
    """With evenly spaced uniform numbers, each token's share is its probability up to one number at either end."""
    torch.manual_seed(0)
    logits, draws = torch.randn(1000) * 3, 20_000
    uniform = (torch.arange(draws) + 0.5) / draws
    table = SamplingTable.of([params], 1000, torch.device("cpu"))
    found = torch.zeros(1000, dtype=torch.long)
    for piece in uniform.split(2_000):
        ids, logprobs = sample_tokens(logits.expand(len(piece), -1), piece, table, torch.zeros(len(piece)).long())
        found += ids.bincount(minlength=1000)
        whole = (logits / params.temperature).log_softmax(-1)
        torch.testing.assert_close(logprobs, whole[ids], atol=2e-6, rtol=1e-5)
    expected = allowed_distribution(logits, params)
    assert (found / draws - expected).abs().max() <= 1.5 / draws + 1e-5
    assert not found[expected == 0].any()


def test_greedy_rows_take_the_first_maximum():
    logits = torch.zeros(1, 50)
    logits[0, [20, 30]] = 5.0
    table = SamplingTable.of([SamplingParams(1, temperature=0.0)], 50, torch.device("cpu"))
    ids, logprobs = sample_tokens(logits, torch.tensor([0.999]), table, torch.tensor([0]))
    assert ids.tolist() == [20]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, 20])


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((2, 10), float("-inf"))
    logits[:, 4] = 0.0
    table = SamplingTable.of([SamplingParams(1)], 10, torch.device("cpu"))
    ids, _ = sample_tokens(logits, torch.tensor([0.0, 1 - 2**-24]), table, torch.zeros(2).long())
    assert ids.tolist() == [4, 4]
