"""The sampler: prompts of a step in, this rank's samples out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import compress
from statistics import fmean, pstdev
from typing import Any

from rlpost.config.schema import RolloutConfig
from rlpost.data.templates import decode_all
from rlpost.rollout.engine import Completion, Engine, Request, SamplingParams
from rlpost.types import Prompt, Sample, groups


class Sampler:
    """Samples this rank's share of the prompts on this rank's engine.

    Every engine is given an even, contiguous part of the prompts (`rollout.schedule: static`), and with it all samples
    of a prompt, which it computes once. `engine_ranks` neighbouring ranks share an engine: all of them ask for its
    whole part, and each keeps every engine_ranks-th prompt. What is sampled does not depend on the number of ranks.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        config: RolloutConfig,
        *,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        engine_ranks: int = 1,
    ):
        if not 0 <= rank < ranks or ranks % engine_ranks:
            raise ValueError(f"rank={rank} of ranks={ranks}, engine_ranks={engine_ranks}: engines need equal parts")
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.seed, self.rank, self.ranks, self.engine_ranks = seed, rank, ranks, engine_ranks
        self.params = SamplingParams(
            max_tokens=config.max_response_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=tuple(config.stop_token_ids),
        )

    def sample(
        self,
        prompts: Sequence[Prompt],
        step: int,
        *,
        n: int | None = None,
        params: SamplingParams | None = None,
        stream: str = "train",
        first: int = 0,
    ) -> list[Sample]:
        """n samples of each prompt of this rank's share, group after group.

        prompts: those of all ranks, the same list on each. n and params: by default the configuration's. stream:
        "train" or "eval/<name>"; streams draw different random numbers. first: the position in the step of the first
        prompt, where a step samples more than once.
        """
        n, params = n or self.config.samples_per_prompt, params or self.params
        engine, engines = self.rank // self.engine_ranks, self.ranks // self.engine_ranks
        start, end = (len(prompts) * k // engines for k in (engine, engine + 1))
        drawn = [(position, index) for position in range(start, end) for index in range(n)]
        requests = [
            Request(prompts[p].ids, params, sample_seed(self.seed, stream, step, prompts[p].id, first + p, i))
            for p, i in drawn
        ]
        completions = self.engine.generate(requests) if requests else []
        mine = [(p - start) % self.engine_ranks == self.rank % self.engine_ranks for p, _ in drawn]
        completions = list(compress(completions, mine))
        texts = decode_all(self.tokenizer, [completion.ids for completion in completions])
        return [
            self._sample(prompts[p], group_id(step, first + p), i, completion, text)
            for (p, i), completion, text in zip(compress(drawn, mine), completions, texts)
        ]

    def _sample(self, prompt: Prompt, group: int, index: int, completion: Completion, text: str) -> Sample:
        masked = self.config.mask_truncated and completion.finish_reason == "length"
        return Sample(
            prompt=prompt,
            group_id=group,
            index=index,
            response_ids=completion.ids,
            response=text,
            rollout_logprobs=completion.logprobs,
            loss_mask=[0 if masked else 1] * len(completion.ids),
            finish_reason=completion.finish_reason,
            version=completion.version,
        )


def group_id(step: int, position: int) -> int:
    """Unique in a run for a prompt's position among the prompts of a step."""
    return step << 32 | position


def sample_seed(seed: int, stream: str, step: int, prompt_id: int, position: int, index: int) -> int:
    """A 63-bit seed, the same in every process and on any number of ranks. The position keeps a prompt that is drawn
    twice in one step from giving the same samples twice."""
    key = f"{seed}\x1f{stream}\x1f{step}\x1f{prompt_id}\x1f{position}\x1f{index}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def rollout_metrics(samples: Sequence[Sample], version: int = 0) -> dict[str, float]:
    """Lengths, finish reasons, staleness and, where all samples are judged, rewards. Give it the samples of all ranks:
    a mean of ranks' means is not the mean. version: of the weights that are trained; a sample of older ones is stale by
    the difference."""
    if not samples:
        return {}
    lengths = [len(sample.response_ids) for sample in samples]
    reasons = [sample.finish_reason for sample in samples]
    behind = [max(0, version - sample.version) for sample in samples]
    metrics = {
        "rollout/samples": float(len(samples)),
        "rollout/prompt_tokens/mean": fmean(len(sample.prompt.ids) for sample in samples),
        "rollout/response_tokens/mean": fmean(lengths),
        "rollout/response_tokens/max": float(max(lengths)),
        "rollout/truncated_fraction": reasons.count("length") / len(samples),
        "rollout/aborted_fraction": reasons.count("abort") / len(samples),
        "rollout/staleness/mean": fmean(behind),
        "rollout/staleness/max": float(max(behind)),
    }
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if len(rewards) == len(samples):
        metrics |= {
            "rollout/reward/mean": fmean(rewards),
            "rollout/reward/std": pstdev(rewards),
            "rollout/reward/max": max(rewards),
            "rollout/equal_reward_groups": fmean(
                len({sample.reward for sample in group}) == 1 for group in groups(samples)
            ),
        }
    return metrics
