"""What torchrun is told, and how a rank leaves it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of prctl(2)
STOPPED = "stopped at once; the last checkpoint is intact"


def die_with_parent() -> None:
    """The kernel kills this process when its parent ends: it cannot wait for ever for one that was killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def follow_launcher() -> None:
    """A rank of torchrun ends with it, from its first moment: a rank that still looks for the others would look on for
    as long as collectives may take."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    die_with_parent()
    # Before that call the launcher, a Python program, may have gone: then init is the parent.
    if os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes():
        os._exit(1)


def tell_launcher(text: str, mine: bool) -> None:
    """Why this rank ends: torchrun's summary shows it. Its root cause is the first failure by time, so that ranks which
    only follow another's failure (not mine) are dated later."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    shown = text if mine else "ended by another rank's failure, see there"
    try:
        Path(path).write_text(json.dumps({"message": shown, "timestamp": int(time.time()) + (0 if mine else 5)}))
    except OSError as problem:
        print(f"rlpost: torchrun is not told of the failure: {problem}", file=sys.stderr)


def leave(code: int) -> None:
    """End now, without waiting for collectives that a failed rank will never join."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
