"""Evaluation on named sets, and what a notebook asks of the current weights: generate and score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rlpost.data.packing import pack, unpack
from rlpost.data.templates import render
from rlpost.rollout.engine import SamplingParams
from rlpost.types import Message, MicroBatch, Prompt, Sample, groups

if TYPE_CHECKING:
    from rlpost.assemble import Rooms
    from rlpost.policy.logits import Head


@dataclass
class EvalSet:
    """A held-out set and how to sample on it."""

    name: str
    prompts: list[Prompt]
    params: SamplingParams
    samples: int = 1


def evaluate(rooms: Rooms, step: int) -> dict[str, float]:
    """Metrics of every eval set, written to the run. Every row exactly once, on any number of ranks."""
    if rooms.judge is None:
        raise ValueError("an evaluation needs a reward: choose reward=choice, reward=exact, or bring one")
    found: dict[str, float] = {}
    for eval_set in rooms.eval_sets:
        samples = rooms.sampler.sample(
            eval_set.prompts, step, n=eval_set.samples, params=eval_set.params, stream=f"eval/{eval_set.name}"
        )
        rooms.judge.score(samples)
        samples = rooms.gather(samples)
        metrics = eval_metrics(samples, eval_set.samples)
        metrics = {f"eval/{eval_set.name}/{name}": value for name, value in metrics.items()}
        rooms.observer.eval_done(step, eval_set.name, metrics, samples)
        found |= metrics
    return found


def eval_metrics(samples: Sequence[Sample], n: int) -> dict[str, float]:
    """mean@n, its standard error over prompts, pass@n (a reward of 1 or more in n tries), truncation, length."""
    assert all(sample.reward is not None for sample in samples), "judge before measuring"
    rewards = [[sample.reward for sample in group] for group in groups(samples)]
    means = torch.tensor([sum(r) / len(r) for r in rewards], dtype=torch.float64)
    metrics = {
        f"mean@{n}": means.mean().item(),
        "stderr": means.std().item() / math.sqrt(len(means)) if len(means) > 1 else 0.0,
        "truncated_fraction": sum(s.finish_reason == "length" for s in samples) / len(samples),
        "response_tokens/mean": sum(len(s.response_ids) for s in samples) / len(samples),
    }
    if n > 1:
        metrics[f"pass@{n}"] = sum(max(r) >= 1.0 for r in rewards) / len(rewards)
    return metrics


def generate(
    rooms: Rooms, prompts: Sequence[str | list[Message]], n: int, step: int, **sampling: Any
) -> list[list[str]]:
    known = ("max_tokens", "temperature", "top_p", "top_k")
    unknown = sorted(set(sampling) - set(known))
    if unknown:
        raise TypeError(f"generate has no option {', '.join(map(repr, unknown))}. There are: {', '.join(known)}")
    rendered = [_prompt(rooms, i, prompt) for i, prompt in enumerate(prompts)]
    params = replace(rooms.sampler.params, **sampling)
    samples = rooms.gather(rooms.sampler.sample(rendered, step, n=n, params=params, stream="generate"))
    texts: list[list[str]] = [[] for _ in prompts]
    for sample in samples:
        texts[sample.prompt.id].append(sample.response)
    return texts


def score(rooms: Rooms, prompts: Sequence[str | list[Message]], responses: Sequence[str]) -> list[list[float]]:
    if len(prompts) != len(responses):
        raise ValueError(f"score needs one response to each prompt, not {len(responses)} to {len(prompts)}")
    samples = [
        Sample(
            _prompt(rooms, i, prompt),
            group_id=i,
            index=0,
            response_ids=rooms.tokenizer.encode(response, add_special_tokens=False),
        )
        for i, (prompt, response) in enumerate(zip(prompts, responses))
    ]
    return [row.tolist() for row in score_samples(rooms, samples)]


def score_samples(rooms: Rooms, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """Log-probs [R] of every sample's response tokens under the trained model."""
    micros = pack(samples, rooms.batcher.max_tokens)
    results = rooms.policy.score(micros, target_logprobs)
    found: dict[int, torch.Tensor] = {}
    for micro, result in zip(micros, results):
        for sample, row in zip(micro.samples, unpack(micro, result["logprobs"])):
            found[id(sample)] = row
    return [found[id(sample)] for sample in samples]


def target_logprobs(head: Head, micro: MicroBatch) -> dict[str, torch.Tensor]:
    return {"logprobs": head.logprobs(micro.target_N).logprobs_N}


def _prompt(rooms: Rooms, number: int, prompt: str | list[Message]) -> Prompt:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    ids = render(rooms.tokenizer, messages, **rooms.config.data.chat_template_kwargs)
    return Prompt(number, messages, ids)
