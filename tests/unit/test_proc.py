"""Stacks of another process are taken when they are written to their end, however slow it is."""

import os
import signal
import subprocess
import sys
import time

from rlpost.proc import is_handling

SPINS = """
import faulthandler, os, signal, sys
pipe = int(sys.argv[1])
faulthandler.register(signal.SIGUSR1, file=pipe, all_threads=True, chain=False)
os.write(1, b"ready")
while True:
    pass
"""


def wait_for(condition):
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        os.sched_yield()


def test_a_handler_that_has_not_written_all_is_waited_for():
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    filled = 0
    while filled < 2**20:
        try:
            filled += os.write(theirs, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(theirs, True)
    child = subprocess.Popen([sys.executable, "-c", SPINS, str(theirs)], pass_fds=[theirs], stdout=subprocess.PIPE)
    os.close(theirs)
    try:
        assert child.stdout.read(5) == b"ready"
        assert not is_handling(child.pid, signal.SIGUSR1)
        child.send_signal(signal.SIGUSR1)
        assert all(is_handling(child.pid, signal.SIGUSR1) for _ in range(200))  # its pipe is full
        os.read(ours, filled)
        wait_for(lambda: not is_handling(child.pid, signal.SIGUSR1))
        assert b"line" in os.read(ours, 4096)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        os.close(ours)
