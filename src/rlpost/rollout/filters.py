"""Dynamic sampling: rollouts go on until enough groups pass a filter (DAPO, https://arxiv.org/abs/2503.14476)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlpost.imports import import_object
from rlpost.parallel import all_gather_objects
from rlpost.types import Sample, groups

if TYPE_CHECKING:
    from rlpost.assemble import Rooms

GroupFilter = Callable[[Sequence[Sample]], bool]


def nonzero_std(group: Sequence[Sample]) -> bool:
    """Rewards differ, so that a group-relative advantage is not 0."""
    rewards = [sample.reward for sample in group]
    return min(rewards) != max(rewards)


BUILTIN: dict[str, GroupFilter] = {"nonzero_std": nonzero_std}


def build_filter(spec: str | GroupFilter) -> GroupFilter:
    """From a built-in name, an import path, or a function `fn(samples of one group) -> bool`."""
    if callable(spec):
        return spec
    if spec in BUILTIN:
        return BUILTIN[spec]
    if "." not in spec:
        raise ValueError(f"rollout.filter={spec} is not allowed; allowed are {', '.join(BUILTIN)}, or an import path")
    try:
        return import_object(spec)
    except ImportError as error:
        raise ValueError(f"rollout.filter={spec} is not allowed; {error}") from error


def sample_until_full(rooms: Rooms, step: int) -> tuple[list[Sample], dict[str, float]]:
    """This rank's judged samples of the first `rollout.prompts_per_step` groups, of all ranks together, that pass.

    Each round draws as many prompts as a step has, `rollout.max_rounds` at most; what passes beyond the number is
    dropped too. Collective: ranks agree on whether to go on. Returns (samples, metrics).
    """
    config = rooms.config.rollout
    kept: dict[int, list[Sample]] = {}
    drawn, passed, metrics = 0, [], {}
    while len(passed) < config.prompts_per_step and drawn < config.max_rounds * config.prompts_per_step:
        prompts = rooms.data.next_batch(config.prompts_per_step)
        samples = rooms.sampler.sample(prompts, step, first=drawn)
        drawn += config.prompts_per_step
        for name, count in rooms.judge.score(samples).items():
            metrics[name] = metrics.get(name, 0.0) + count
        kept |= {group[0].group_id: group for group in groups(samples) if rooms.group_filter(group)}
        passed = sorted({number for part in all_gather_objects(sorted(kept)) for number in part})
    chosen = set(passed[: config.prompts_per_step])
    metrics |= {"rollout/rounds": drawn / config.prompts_per_step, "rollout/dropped_groups": float(drawn - len(chosen))}
    return [sample for number, group in kept.items() if number in chosen for sample in group], metrics
