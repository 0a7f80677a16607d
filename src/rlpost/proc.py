"""What the system tells of a process: one reading of /proc."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    state: str  # Z: it waits to be reaped, X: gone
    group: int
    born: str  # the kernel's clock ticks: another process may get the same number later

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def process(pid: int) -> Process:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return Process("X", 0, "")
    return Process(fields[0], int(fields[2]), fields[19])


def group_is_alive(group: int) -> bool:
    """Whether anything but zombies is left of a process group."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's
            found = process(int(folder.name))
            if found.group == group and found.alive:
                return True
    return False


def is_handling(pid: int, number: int) -> bool:
    """Whether the main thread has still to take this signal, or runs its C handler, which blocks it meanwhile. OSError
    where the process is gone."""
    masks = re.findall(r"^(?:SigPnd|ShdPnd|SigBlk):\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
