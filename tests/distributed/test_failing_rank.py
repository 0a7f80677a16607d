"""One rank's failure is every rank's, within seconds and with one message."""

import time
from pathlib import Path

import pytest
from launch import run_ranks

WORKER = str(Path(__file__).with_name("failing_rank.py"))
MESSAGE = "rank 1 failed in phase 'train' of step 3: gradient buffer is on fire"


@pytest.mark.parametrize("where", ["agreement", "collective"])
def test_all_ranks_end_within_ten_seconds_of_the_failure(where):
    start = time.monotonic()
    run = run_ranks([WORKER, where], 3, timeout=60)
    seconds = time.monotonic() - start
    assert run.returncode != 0
    assert f"rank 1 raised: {MESSAGE}" in run.stdout
    assert "went on" not in run.stdout
    if where == "agreement":
        for rank in (0, 2):
            assert f"rank {rank} raised: {MESSAGE}" in run.stdout or "SIGTERM" in run.stderr
    assert seconds < 25  # the start of three interpreters included
