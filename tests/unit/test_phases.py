"""The state machine in one process: order, residents, retries, failures."""

import pytest

from rlpost.config.schema import PhaseConfig
from rlpost.failures import PhaseError
from rlpost.phases import Agreement, PhaseMachine


class Recorded:
    def __init__(self, name, size, events):
        self.name, self.size, self.events = name, size, events
        self.on_device = False

    def bytes(self):
        return self.size

    def onload(self):
        self.events.append(f"+{self.name}")
        self.on_device = True
        return self.size

    def offload(self):
        self.events.append(f"-{self.name}")
        self.on_device = False
        return self.size


def machine(phases, handlers, events, reports=None):
    residents = {name: Recorded(name, size, events) for name, size in (("a", 1), ("b", 10), ("c", 100))}
    on_report = (lambda report: None) if reports is None else reports.append
    return PhaseMachine(phases, handlers, residents, Agreement(), on_report=on_report)


def test_moves_exactly_the_difference_of_residents():
    events, reports = [], []
    phases = [PhaseConfig("one", ["a", "b"]), PhaseConfig("two", ["b", "c"]), PhaseConfig("three", ["b", "c"])]
    handlers = {name: (lambda work, name=name: events.append(name)) for name in ("one", "two", "three")}
    m = machine(phases, handlers, events, reports)
    for number in range(3):
        assert m.run(number, 0, None) is False
    assert events == ["+a", "+b", "one", "-a", "+c", "two", "three"]
    assert [r.moved_bytes for r in reports] == [11, 101, 0]
    assert [r.resident_bytes for r in reports] == [11, 110, 110]


def test_an_interrupt_stays_one_where_a_library_stumbles_over_it():
    def interrupted(work):
        try:
            raise KeyboardInterrupt
        finally:
            None.clean_up()

    with pytest.raises(KeyboardInterrupt):
        machine([PhaseConfig("judge")], {"judge": interrupted}, []).run(0, 7, None)


def test_a_failure_names_phase_step_and_reason():
    def fail(work):
        raise ValueError("no such column")

    m = machine([PhaseConfig("judge")], {"judge": fail}, [])
    with pytest.raises(PhaseError, match="rank 0 failed in phase 'judge' of step 7: no such column"):
        m.run(0, 7, None)


def test_retries_then_gives_up():
    tries = []

    def flaky(work):
        tries.append(1)
        if len(tries) < work:
            raise RuntimeError("engine busy")

    m = machine([PhaseConfig("rollout", retries=2)], {"rollout": flaky}, [])
    m.run(0, 0, 3)
    assert len(tries) == 3
    tries.clear()
    with pytest.raises(PhaseError, match="engine busy"):
        m.run(0, 0, 4)
    assert len(tries) == 3


def test_a_stop_request_is_reported_after_the_phase():
    m = machine([PhaseConfig("one")], {"one": lambda work: None}, [])
    m.agreement.stop_requested = True
    assert m.run(0, 0, None) is True


def test_a_notebook_may_go_on_after_a_failure():
    def fail(work):
        raise ValueError(work)

    m = machine([PhaseConfig("judge")], {"judge": fail}, [])
    for reason in ("first", "second"):
        with pytest.raises(PhaseError, match=f"phase 'judge' of step 7: {reason}"):
            m.run(0, 7, reason)
