"""Collapse is said once, when it begins."""

import json

import pytest

from rlpost.config.schema import GuardsConfig
from rlpost.observe.guards import DISTANCE, LENGTH, REWARD, Guards


def feed(guards, name, values):
    """Step numbers (from 0) at which an alarm began."""
    return [i for i, value in enumerate(values) if guards.check({name: value})]


@pytest.mark.parametrize(
    ("options", "name", "values", "when"),
    [
        ({"reward_drop": 0.5}, REWARD, [0.1, 0.9, 0.9, 0.5, 0.3, 0.3, 0.0], [4]),
        ({"reward_drop": 0.5}, REWARD, [0.0] * 6, []),
        ({"length_factor": 2.0}, LENGTH, [10, 10, 15, 25, 30, 10, 10, 4, 4, 4], [4, 8]),
        ({"min_entropy": 0.1}, "policy/entropy", [1.0, 0.2, 0.1, 0.05, 0.0, 0.3, 0.0, 0.0], [3, 7]),
        ({"min_entropy": 0.1}, "sdpo/student_entropy", [0.0, 0.0], [1]),
        ({"max_teacher_distance": 0.2}, DISTANCE, [0.1, 0.2, 0.3], [2]),
        ({}, DISTANCE, [9.0] * 5, []),
    ],
)
def test_alarms_begin_once(options, name, values, when):
    assert feed(Guards(GuardsConfig(window=2, **options)), name, values) == when


def test_an_alarm_names_numbers():
    guards = Guards(GuardsConfig(window=1, reward_drop=0.5))
    guards.check({REWARD: 0.8})
    (text,) = guards.check({REWARD: 0.2, LENGTH: 7})
    assert "0.2" in text and "0.8" in text
    assert guards.check({LENGTH: 7}) == []  # a step without the reward changes nothing
    assert guards.check({REWARD: 0.1}) == []


def test_a_resumed_run_goes_on_watching():
    values = [0.1, 0.9, 0.9, 0.5, 0.3, 0.3, 0.0]
    first, second = (Guards(GuardsConfig(window=2)) for _ in range(2))
    feed(first, REWARD, values[:4])
    second.load_state_dict(first.state_dict())
    assert feed(second, REWARD, values[4:]) == [0]


def reward_of(mean, std, samples=8.0):
    return {REWARD: mean, "rollout/reward/std": std, "rollout/samples": samples}


def test_rewards_that_say_nothing_are_said_once():
    guards = Guards(GuardsConfig())
    flat, told = reward_of(0.0, 0.0), reward_of(0.1, 0.3)
    assert [guards.hint(m) for m in [flat] * 4 + [told] + [flat] * 4] == [None] * 9
    resumed = Guards(GuardsConfig())
    resumed.load_state_dict(json.loads(json.dumps(guards.state_dict())))
    for one in (guards, resumed):
        assert "every sample of the last 5 steps had the reward 0:" in one.hint(flat)
        assert [one.hint(m) for m in [flat] * 9 + [told] + [flat] * 9] == [None] * 19


@pytest.mark.parametrize("metrics", [{}, reward_of(1.0, 0.0, samples=1.0), reward_of(0.5, 0.1)])
def test_no_hint_where_there_is_nothing_to_compare(metrics):
    guards = Guards(GuardsConfig())
    assert [guards.hint(metrics) for _ in range(9)] == [None] * 9


def test_the_best_evaluated_step_is_found_among_those_that_are_kept():
    guards = Guards(GuardsConfig(action="fallback"))
    assert guards.best([0, 2]) is None
    for step, score in ((0, 0.9), (2, 0.3), (4, 0.7), (6, 0.7), (8, 0.1)):
        guards.evaluated(step, {"eval/a/mean@4": score + 0.1, "eval/b/mean@1": score - 0.1, "eval/a/pass@4": 1.0})
    assert guards.best([2, 4, 6, 7, 8]) == 6  # the latest of the best; 7 was not evaluated
    assert guards.best([]) is None and guards.best([7]) is None
    guards.evaluated(9, {})
    assert guards.best([2, 9]) == 2
    assert Guards(GuardsConfig(action="stop")).best([2]) is None


def test_after_a_fallback_a_whole_window_must_collapse_again():
    config = GuardsConfig(window=2, action="fallback")
    guards = Guards(config)
    assert feed(guards, REWARD, [0.8, 0.8, 0.1, 0.1]) == [3]
    guards.fell_back()
    resumed = Guards(config)
    guards.evaluated(3, {"eval/a/mean@1": 0.5})
    resumed.load_state_dict(json.loads(json.dumps(guards.state_dict())))
    for one in (guards, resumed):
        assert one.fallbacks == 1 and one.best([3]) == 3
        assert feed(one, REWARD, [0.1, 0.8, 0.1, 0.1]) == [3]
