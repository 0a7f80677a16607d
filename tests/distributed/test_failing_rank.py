"""One rank's failure, death or hang is every rank's, within seconds and with one message."""

import re
import time
from pathlib import Path

import pytest
from launch import run_ranks

WORKER = str(Path(__file__).with_name("failing_rank.py"))
SENTENCE = "rank 1 failed in phase 'train' of step 3: "
HANG = "no end after 2 s (trainer.phase_timeout_s): "
WAIT = "rank 0, 2 only wait for others; the stacks of all ranks are in "

# fault, where the others are: what the sentence says, and what stands in the stacks of rank 1
CASES = {
    ("raises", "agreement"): ("gradient buffer is on fire", None),
    ("raises", "collective"): ("gradient buffer is on fire", None),
    ("is_killed", "collective"): (r"its process \d+ is gone: it was killed .* or crashed", None),
    ("is_stopped", "agreement"): (re.escape(f"{HANG}rank 1 does not respond; {WAIT}"), "in is_stopped"),
    ("is_stopped_again_late", "agreement"): (re.escape(f"{HANG}rank 1 does not respond; {WAIT}"), "in is_stopped"),
    ("waits", "collective"): (
        re.escape(HANG) + r"rank 1 is at distributed/failing_rank.py:\d+ \(waits\); " + re.escape(WAIT),
        "in waits",
    ),
    ("spins", "agreement"): (re.escape(f"{HANG}rank 1 does not respond; {WAIT}"), "in spins"),
}


@pytest.mark.parametrize(("fault", "where"), CASES)
def test_all_ranks_end_with_one_sentence(fault, where, tmp_path):
    said, stack = CASES[fault, where]
    start = time.monotonic()
    run = run_ranks([WORKER, fault, where, str(tmp_path)], 3, timeout=120)
    seconds = time.monotonic() - start
    assert run.returncode == 1
    assert "went on" not in run.stdout
    before, _, summary = run.stderr.partition("FAILED\n")
    (sentence,) = [line for line in before.splitlines() if "failed in phase" in line]  # of all ranks together
    assert re.match(re.escape(SENTENCE) + said, sentence), sentence
    if fault == "raises":
        assert f"The traceback is in {tmp_path}/log.txt. What was saved before is intact." in before
        assert "in raises" in (tmp_path / "log.txt").read_text()
    assert sentence in summary  # torchrun's last words
    assert SENTENCE in (tmp_path / "log.txt").read_text()
    if stack:
        stacks = {p.name: p.read_text() for p in (tmp_path / "stacks").iterdir()}
        assert sorted(stacks) == ["rank_0.txt", "rank_1.txt", "rank_2.txt"]
        assert stack in stacks["rank_1.txt"]
        assert "in meet" in stacks["rank_0.txt"] if where == "agreement" else "all_reduce" in stacks["rank_0.txt"]
    assert seconds < 60  # the start of three interpreters included; torchrun alone would wait 30 s for one that hangs


def test_where_no_rank_can_speak_any_more_the_stacks_are_on_the_terminal(tmp_path):
    run = run_ranks([WORKER, "spins", "everywhere", str(tmp_path)], 2, timeout=120)
    assert run.returncode == 1
    assert run.stderr.count("in spins") == 2 and "went on" not in run.stdout
