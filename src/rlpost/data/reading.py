"""Rows from JSONL, JSON, Parquet or a Hugging Face data set, each with the place it came from."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpost.imports import did_you_mean

log = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Row:
    values: Mapping[str, Any]
    where: str  # "train.jsonl:12", for messages


class DataError(ValueError):
    """A data set that cannot be used, with file and line where there is one."""


@dataclass
class BadRows:
    """What happens to a row that cannot be used: `error` raises, `skip` counts it by reason. remedy: what chooses
    `skip`, for the message."""

    policy: str = "error"
    remedy: str = "data.on_bad_row=skip"
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.policy not in ("error", "skip"):
            raise ValueError(f"data.on_bad_row={self.policy} is not allowed; allowed are error, skip")

    def report(self, where: str, reason: str) -> None:
        if self.policy == "error":
            raise DataError(f"{where}: {reason} ({self.remedy} leaves such rows out and counts them)")
        self.counts[reason.split(":")[0]] += 1
        log.info("left out %s: %s", where, reason)


Source = str | Path | Mapping[str, Any]


def read_rows(
    sources: str | Path | Sequence[Source] | Mapping[str, str | Path | Sequence[Source]], bad: BadRows
) -> list[Row]:
    """All rows of one source or several, in their order. Of a mapping the keys become the rows' column `source`,
    where they have none.

    A source is a .jsonl, .json or .parquet file, a folder of them, a folder written by `datasets.save_to_disk`, a
    Hugging Face data set (`id`, `id:split`), or a row itself (a dict). Raises DataError where nothing is left.
    """
    if isinstance(sources, Mapping):
        named = [(name, row) for name, given in sources.items() for row in read_rows(given, bad)]
        return [Row({"source": name, **row.values}, row.where) for name, row in named]
    listed = [sources] if isinstance(sources, str | Path) else list(sources)
    rows: list[Row] = []
    for number, source in enumerate(listed):
        if isinstance(source, str | Path):
            rows += _read_source(str(source), bad)
        elif isinstance(source, Mapping):
            rows.append(Row(source, f"row {number}"))
        else:
            bad.report(f"row {number}", f"wrong type: a row is a dict, not {type(source).__name__}")
    if not rows:
        names = ", ".join(str(s) for s in listed if not isinstance(s, Mapping)) or "an empty list"
        left_out = f"; left out: {dict(bad.counts)}" if bad.counts else ""
        raise DataError(f"no rows in {names}{left_out}")
    return rows


def columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row.values))


def require_column(rows: Sequence[Row], field_name: str, column: str) -> None:
    """DataError naming the config field, the columns that exist and the nearest one."""
    existing = columns(rows)
    if column not in existing:
        source = rows[0].where.rsplit(":", 1)[0]
        raise DataError(
            f"{field_name}={column}: there is no such column in {source}.{did_you_mean(column, existing)} "
            f"Columns: {', '.join(existing)}"
        )


def _read_source(source: str, bad: BadRows) -> Iterator[Row]:
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path, bad)
    if path.suffix in SUFFIXES:
        if not path.is_file():
            siblings = [p.name for p in path.parent.glob("*") if p.suffix in SUFFIXES] if path.parent.is_dir() else []
            raise DataError(f"no such file: {path}.{did_you_mean(path.name, siblings)}")
        return {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}[path.suffix](path, bad)
    if path.exists():
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; known are {', '.join(SUFFIXES)}")
    return _read_hub(source, bad)


def _read_folder(folder: Path, bad: BadRows) -> Iterator[Row]:
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        yield from _read_saved(folder, bad)
        return
    files = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES)
    if not files:
        raise DataError(f"{folder}: no {', '.join(SUFFIXES)} file in this folder")
    for file in files:
        yield from _read_source(str(file), bad)


def _read_jsonl(path: Path, bad: BadRows) -> Iterator[Row]:
    # Line by line as bytes: str.splitlines would also cut at separators that JSON strings may hold.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield from _parse(line.removeprefix(b"\xef\xbb\xbf"), f"{path}:{number}", bad)


def _parse(text: bytes, where: str, bad: BadRows) -> Iterator[Row]:
    try:
        value = json.loads(text)
    except UnicodeDecodeError as error:
        bad.report(where, f"not UTF-8: {error}")
    except json.JSONDecodeError as error:
        bad.report(where, f"broken JSON: {error.msg} at column {error.colno}")
    else:
        yield from _row(value, where, bad)


def _row(value: Any, where: str, bad: BadRows) -> Iterator[Row]:
    if isinstance(value, dict):
        yield Row(value, where)
    else:
        bad.report(where, f"wrong type: a row is a JSON object, not {type(value).__name__}")


def _read_json(path: Path, bad: BadRows) -> Iterator[Row]:
    """A list of objects; a file of one object a line (as some hubs name them .json) is read as such."""
    text = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        if text.lstrip()[:1] == b"{":
            yield from _read_jsonl(path, bad)
            return
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"{path}{line}: broken JSON: {error}") from error
    for number, item in enumerate(value if isinstance(value, list) else [value], 1):
        yield from _row(item, f"{path}:item {number}", bad)


def _read_parquet(path: Path, bad: BadRows) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error
    for number, item in enumerate(table.to_pylist(), 1):
        yield from _row(item, f"{path}:row {number}", bad)


def _read_saved(folder: Path, bad: BadRows) -> Iterator[Row]:
    import datasets

    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        if "train" not in saved:
            raise DataError(f"{folder}: no split 'train'; splits: {', '.join(saved)}. Name one: {folder}/<split>")
        saved = saved["train"]
    for number, item in enumerate(saved, 1):
        yield from _row(item, f"{folder}:row {number}", bad)


def _read_hub(source: str, bad: BadRows) -> Iterator[Row]:
    import datasets

    name, _, split = source.partition(":")
    try:
        loaded = datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError, RuntimeError) as error:
        # OSError covers hub and network errors; ValueError an unknown split or configuration.
        raise DataError(
            f"{source}: neither a file, a folder, nor a data set that `datasets` can load: {error}"
        ) from error
    for number, item in enumerate(loaded, 1):
        yield from _row(item, f"{source}:row {number}", bad)
