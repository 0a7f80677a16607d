"""What torchrun is told, and how a rank leaves it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

STOPPED = "stopped at once; the last checkpoint is intact"


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
