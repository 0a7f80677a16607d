"""timeline.json: when each phase ran, as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rlpost.files import naming

TAIL = b"\n]\n"


class Timeline:
    """Appends events; the file is a whole JSON array after every one. Times are seconds since the epoch, so the parts
    of a resumed run stand one after the other. rank becomes the trace's process."""

    def __init__(self, run_dir: str | Path, rank: int = 0):
        self.path = Path(run_dir) / "timeline.json"
        self.rank = rank

    def record(self, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """A phase that ran from start to end (time.time()); args (step, bytes, …) are shown with it."""
        event = {
            "name": name,
            "cat": "phase",
            "ph": "X",
            "ts": round(start_s * 1e6),
            "dur": round((end_s - start_s) * 1e6),
            "pid": self.rank,
            "tid": 0,
            "args": args,
        }
        self._append(json.dumps(event).encode())

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self.record(name, start, time.time(), **args)

    def _append(self, event: bytes) -> None:
        if not self.path.exists() or self.path.stat().st_size < len(TAIL):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with naming(self.path):
                self.path.write_bytes(b"[\n" + event + TAIL)
            return
        with naming(self.path), open(self.path, "r+b", buffering=0) as f:
            f.seek(-len(TAIL), 2)
            end = f.tell()
            if f.read() != TAIL:  # a kill or a full disk cut the last event short
                end = _whole(f)
            f.seek(end)
            f.write((b",\n" if end > len(b"[") else b"\n") + event + TAIL)
            f.truncate()


def _whole(f: BinaryIO) -> int:
    """Where the last whole event ends; after the opening bracket where there is none."""
    f.seek(0)
    text = f.read()
    return max(text.rfind(b"}},\n") + len(b"}}"), len(b"["))
