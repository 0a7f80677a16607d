"""metrics.jsonl: one JSON object per step, readable at any moment."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlpost.files import naming

FILE = "metrics.jsonl"


class MetricsLog:
    """Appends to `<run_dir>/metrics.jsonl`; one line is one write, so a reader never sees half of one for long.

    Values that are not finite are written as null and named under "nonfinite": JSON has no NaN, and none may pass
    unseen.
    """

    def __init__(self, run_dir: str | Path):
        self.path = Path(run_dir) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: _number(name, value) for name, value in metrics.items() if name != "step"}
        nonfinite = [name for name, value in values.items() if not math.isfinite(value)]
        row: dict[str, Any] = {"step": step, **values, **dict.fromkeys(nonfinite)}
        if nonfinite:
            row["nonfinite"] = nonfinite
        append(self.path, json.dumps(row, allow_nan=False) + "\n")

    def cut_after(self, step: int) -> None:
        """Forget the lines of later steps (all, for −1): a resumed run writes them again."""
        self.drop(lambda row: row["step"] > step)

    def drop(self, unwanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Forget lines, and what a kill left of the last one."""
        if self.path.exists():
            drop_lines(self.path, unwanted)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a run directory or of its metrics.jsonl. A last line that a kill cut short is left out; any other
    damage is a ValueError naming the line."""
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    lines = path.read_text().splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValueError(f"{path}, line {number}: no JSON object ({error})") from error
    return rows


def drop_lines(path: Path, unwanted: Callable[[Mapping[str, Any]], bool]) -> None:
    """Replace a file of JSON lines by those that are wanted."""
    kept = [row for row in read_metrics(path) if not unwanted(row)]
    beside = path.with_suffix(".tmp")
    with naming(beside):
        beside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    os.replace(beside, path)


def append(path: Path, text: str) -> None:
    """Append to a file that others may append to: each call's text stays in one piece."""
    data = text.encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.lockf(descriptor, os.F_LOCK, 0)  # one system call may write less than all of a large text
        with naming(path):
            while data:
                data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"metric {name!r} is {value!r}; metrics are numbers")
    return value if isinstance(value, (int, float)) else float(value)
