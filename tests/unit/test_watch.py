"""What the watch-dog says of work that takes long; its faults have whole runs in tests/distributed and tests/e2e."""

import logging
import time

import torch.distributed as dist

from rlpost.observe.logs import NOTICE
from rlpost.watch import LONG_S, Watch


def test_long_work_is_spoken_of_after_30_seconds_and_after_twice_the_time(caplog):
    caplog.set_level(logging.INFO, "rlpost")
    watch = Watch(0, dist.HashStore(), None)
    watch.close()  # its own thread is not needed
    with watch.during("rollout", 3, 0.0, "trainer.phase_timeout_s"):
        work = watch._work
        watch._look()
        assert not caplog.records
        for passed in (LONG_S, LONG_S + 1, 2 * LONG_S, 4 * LONG_S):
            work.begun = time.monotonic() - passed
            watch._look()
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert said == [(NOTICE, f"rollout (step 3) has run for {took}") for took in ("0:30", "1:00", "2:00")]
