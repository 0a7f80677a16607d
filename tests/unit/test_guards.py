"""Collapse is said once, when it begins."""

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
