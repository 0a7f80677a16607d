"""Dynamic sampling, and rewards on length."""

from types import SimpleNamespace

import pytest

from rlpost.rewards.judge import build_judge
from rlpost.rollout.filters import build_filter, nonzero_std, sample_until_full
from rlpost.rollout.sampler import group_id
from rlpost.types import Prompt, Sample


def sample(length, group=0, index=0, reward=None):
    return Sample(Prompt(0, [], [1]), group, index, response_ids=[1] * length, reward=reward)


def rooms(*, wanted, max_rounds, good):
    """Prompts 0, 1, 2, …; the group of a prompt in `good` has two different rewards."""
    state = SimpleNamespace(next=0, firsts=[])

    def next_batch(n):
        state.next += n
        return list(range(state.next - n, state.next))

    def draw(prompts, step, first):
        state.firsts.append(first)
        return [sample(p, group_id(step, first + i), k) for i, p in enumerate(prompts) for k in range(2)]

    def score(samples):
        for s in samples:
            s.reward = float(s.index) if len(s.response_ids) in good else 0.0
        return {"reward/errors": 1.0}

    return state, SimpleNamespace(
        config=SimpleNamespace(rollout=SimpleNamespace(prompts_per_step=wanted, max_rounds=max_rounds)),
        data=SimpleNamespace(next_batch=next_batch),
        sampler=SimpleNamespace(sample=draw),
        judge=SimpleNamespace(score=score),
        group_filter=nonzero_std,
    )


def test_sampling_goes_on_until_enough_groups_pass():
    state, room = rooms(wanted=3, max_rounds=5, good={1, 4, 6, 8, 9})
    samples, metrics = sample_until_full(room, step=2)
    assert [len(s.response_ids) for s in samples] == [1, 1, 4, 4, 6, 6]  # 8 came too late
    assert [s.group_id for s in samples[::2]] == [group_id(2, p) for p in (1, 4, 6)]
    assert state.firsts == [0, 3, 6]
    assert metrics == {"reward/errors": 3.0, "rollout/rounds": 3.0, "rollout/dropped_groups": 6.0}


def test_sampling_gives_up():
    _, room = rooms(wanted=2, max_rounds=3, good={5})
    samples, metrics = sample_until_full(room, step=0)
    assert [len(s.response_ids) for s in samples] == [5, 5]
    assert metrics["rollout/rounds"] == 3 and metrics["rollout/dropped_groups"] == 5


def test_filters_by_name_by_path_and_by_hand():
    assert build_filter("nonzero_std") is nonzero_std
    assert build_filter("rlpost.rollout.filters.nonzero_std") is nonzero_std
    assert build_filter(len) is len
    for wrong in ("std", "rlpost.rollout.filters.nothing"):
        with pytest.raises(ValueError, match=rf"rollout.filter={wrong} is not allowed"):
            build_filter(wrong)


def test_overlong_is_soft_between_the_buffer_and_the_limit():
    judge = build_judge([{"name": "overlong", "max_tokens": 10, "buffer": 4, "weight": 2.0}])
    samples = [sample(n, group=n) for n in (0, 6, 7, 9, 10)]
    judge.score(samples)
    assert [s.reward for s in samples] == [0.0, 0.0, -0.5, -1.5, -2.0]
    assert samples[2].reward_details == {"overlong": -0.25}
    judge = build_judge({"name": "length", "max_tokens": 10})
    judge.score(samples)
    assert [s.reward for s in samples] == [0.0, -0.6, -0.7, -0.9, -1.0]
    with pytest.raises(ValueError, match="reward.buffer=11"):
        build_judge({"name": "overlong", "max_tokens": 10, "buffer": 11})
