"""Checkpoints: whole fp32 tensors under Hugging Face names, which any layout of ranks can load, written atomically.

    checkpoints/latest                          one line, "step_000010"
    checkpoints/step_000010/manifest.json       format, step, world, versions, config, tensors by kind, files
                            state.json          the trainer's state
                            rank_00000.json     what each rank keeps for itself (with its tensors beside it)
                            master-00000.safetensors …

A checkpoint is written under `step_000010.tmp`, made durable, agreed on by all ranks and renamed, before `latest`
points to it and older ones go: a kill at any moment leaves one that loads.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

import rlpost
from rlpost.parallel import all_gather_objects, rank, world_size
from rlpost.weights.rank_state import read_rank_state, write_rank_state
from rlpost.weights.shards import Shard, file_crc, replace_text, sync_directory, write_durably, write_shards

FORMAT = 1
PACKAGES = ("torch", "megatron-core", "transformers", "safetensors", "sglang")
Tensors = Callable[[], Iterator[tuple[str, Tensor]]]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or must not be loaded; the same on every rank."""


class CheckpointStore:
    """The checkpoints of one run. keep: how many stay. shard_bytes: data per file.

    Every rank builds one and calls `save` and `load` together.
    """

    def __init__(self, directory: str | Path, keep: int = 2, *, shard_bytes: int = 2**30):
        if keep < 1:
            raise ValueError(f"keep={keep} is not allowed; at least one checkpoint must stay (keep ≥ 1)")
        self.directory, self.keep, self.shard_bytes = Path(directory), keep, shard_bytes

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        names = {path.name.removesuffix(".old").removeprefix("step_") for path in self.directory.glob("step_*")}
        return sorted(int(name) for name in names if name.isdigit())

    def latest(self) -> int | None:
        """The step that `latest` points to; None where nothing was saved yet."""
        try:
            pointed = (self.directory / "latest").read_text().strip()
        except FileNotFoundError:
            steps = self.steps()  # the kill came between the first rename and the pointer
            return steps[-1] if steps else None
        return int(pointed.removeprefix("step_"))

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensors],
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None = None,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write the checkpoint of this step. Collective.

        tensors: kind ("master", "exp_avg", "tag.teacher", …) -> a function returning a collective iterator over
        (name, whole tensor): every rank reads it to its end, and rank r writes each world-th file. state: JSON values,
        rank 0's. rank_state: JSON values, tuples and tensors, of each rank. Raises CheckpointError on all ranks, naming
        the rank, where one cannot write; the former checkpoint is untouched then.
        """
        final = self.directory / f"step_{step:06d}"
        beside = final.with_name(final.name + ".tmp")
        try:
            _on_rank_0(self._prepare, beside, failure=f"checkpoint {final}")
            shards, files, error = self._write(beside, tensors, rank_state or {})
            parts = _agree(error, f"checkpoint {final}", value=files)
            manifest = {
                "format": FORMAT,
                "step": step,
                "world": world_size(),
                "versions": versions(),
                "config": config,
                "tensors": {kind: _index(part) for kind, part in shards.items()},
                "files": {name: entry for part in parts for name, entry in part.items()},
            }
            _on_rank_0(self._commit, beside, final, manifest, state, failure=f"checkpoint {final}")
        except CheckpointError:
            if rank() == 0:
                shutil.rmtree(beside, ignore_errors=True)  # the next save sweeps up what cannot go now
            raise
        return final

    def _write(
        self, beside: Path, tensors: Mapping[str, Tensors], rank_state: Mapping[str, Any]
    ) -> tuple[dict[str, list[Shard]], dict[str, list[int]], Exception | None]:
        """This rank's files: what is in all shards, {file: [size, checksum]} of its own, and why it could not."""
        shards: dict[str, list[Shard]] = {}
        error: Exception | None = None
        me, world, planned = rank(), world_size(), 0
        for kind, iterate in tensors.items():
            mine = range((me - planned) % world, sys.maxsize, world) if error is None else ()
            shards[kind], failure = write_shards(
                beside, kind, iterate(), shard_bytes=self.shard_bytes, writes=mine.__contains__
            )
            planned += len(shards[kind])
            error = error or failure
        files = {s.name: [s.file_bytes, s.crc] for part in shards.values() for s in part if s.crc is not None}
        try:
            files |= write_rank_state(beside, me, rank_state)
        except (OSError, TypeError) as failure:
            error = error or failure
        return shards, files, error

    def load(self, step: int | str = "latest", *, verify: bool = True) -> Checkpoint:
        """The checkpoint of this step. Collective.

        verify: checksums too, each rank those of every world-th file. Raises CheckpointError on all ranks for a missing
        or damaged one, saying what differs.
        """
        wanted = self.latest() if step == "latest" else int(step)
        if wanted is None:
            raise CheckpointError(f"no checkpoint in {self.directory}")
        path = self.directory / f"step_{wanted:06d}"
        if not path.is_dir() and path.with_name(path.name + ".old").is_dir():
            path = path.with_name(path.name + ".old")  # the kill came while this step was being replaced
        try:
            if not path.is_dir():
                raise CheckpointError(f"there is none; there are: {', '.join(map(str, self.steps())) or 'none'}")
            checkpoint, error = Checkpoint(path, verify=verify), None
        except (CheckpointError, OSError) as failure:
            checkpoint, error = None, failure
        _agree(error, f"loading checkpoint {path}")
        return checkpoint

    def _prepare(self, beside: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for stale in self.directory.glob("step_*.tmp"):
            shutil.rmtree(stale)
        for replaced in self.directory.glob("step_*.old"):
            if replaced.with_suffix("").is_dir():
                _remove(replaced)
            else:
                os.rename(replaced, replaced.with_suffix(""))
        beside.mkdir()

    def _commit(self, beside: Path, final: Path, manifest: dict, state: Mapping[str, Any]) -> None:
        write_durably(beside / "state.json", json.dumps(dict(state)).encode())
        manifest["files"]["state.json"] = [(beside / "state.json").stat().st_size, file_crc(beside / "state.json")]
        write_durably(beside / "manifest.json", json.dumps(manifest).encode())
        sync_directory(beside)
        if final.is_dir():  # a directory cannot be replaced by a rename; `load` and `_prepare` know `.old`
            os.rename(final, final.with_name(final.name + ".old"))
        os.rename(beside, final)
        sync_directory(self.directory)
        replace_text(self.directory / "latest", final.name + "\n")
        if (old := final.with_name(final.name + ".old")).is_dir():
            _remove(old)
        # Later steps belong to a future that was given up by resuming from an earlier checkpoint.
        former = [step for step in self.steps() if step < manifest["step"]]
        kept = {manifest["step"], *former[max(0, len(former) + 1 - self.keep) :]}
        for step in self.steps():
            if step not in kept:
                _remove(self.directory / f"step_{step:06d}")


class Checkpoint:
    """A loaded checkpoint: its numbers, and its tensors memory-mapped (a tensor is read when it is looked at).

    Attributes: path, step, world (ranks that wrote it), versions, config, state, rank_state (this rank's; with more
    ranks than wrote it, that of rank r modulo world), kinds.
    """

    def __init__(self, path: Path, *, verify: bool = True):
        self.path = path
        manifest = self._read_json("manifest.json")
        if manifest.get("format") != FORMAT:
            raise CheckpointError(f"format {manifest.get('format')!r} in manifest.json; this rlpost reads {FORMAT}")
        self.step: int = manifest["step"]
        self.world: int = manifest["world"]
        self.versions: dict[str, str] = manifest["versions"]
        self.config: dict[str, Any] | None = manifest["config"]
        self._tensors: dict[str, dict[str, dict]] = manifest["tensors"]
        self._check_files(manifest["files"], verify)
        self.state: dict[str, Any] = self._read_json("state.json")
        self.rank_state = read_rank_state(path, rank() % self.world)

    @property
    def kinds(self) -> list[str]:
        return list(self._tensors)

    def tensors(self, kind: str, expected: Mapping[str, Sequence[int]] | None = None) -> Mapping[str, Tensor]:
        """The whole tensors of a kind by name, memory-mapped.

        expected: name -> shape of the model at hand; CheckpointError lists what differs from it.
        """
        if kind not in self._tensors:
            raise CheckpointError(f"checkpoint {self.path} holds no {kind!r}; it holds: {', '.join(self._tensors)}")
        entries = self._tensors[kind]
        if expected is not None:
            differences = _differences({name: entry["shape"] for name, entry in entries.items()}, expected)
            if differences:
                raise CheckpointError(f"checkpoint {self.path} is of another model ({kind}): " + "; ".join(differences))
        return _LazyTensors(self.path, entries)

    def _check_files(self, files: Mapping[str, Sequence[int]], verify: bool) -> None:
        me, world = rank(), world_size()
        wrong = []
        for i, (name, (size, crc)) in enumerate(sorted(files.items())):
            file = self.path / name
            if not file.is_file():
                wrong.append(f"{name} is missing")
            elif file.stat().st_size != size:
                wrong.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
            elif verify and i % world == me and file_crc(file) != crc:
                wrong.append(f"{name} has another checksum than when it was written")
        if wrong:
            raise CheckpointError("; ".join(wrong))

    def _read_json(self, name: str) -> dict:
        try:
            return json.loads((self.path / name).read_text())
        except (FileNotFoundError, ValueError) as error:
            raise CheckpointError(f"{name} is missing or damaged ({error})") from error


class _LazyTensors(Mapping[str, Tensor]):
    def __init__(self, path: Path, entries: Mapping[str, dict]):
        self._path, self._entries = path, entries
        self._open: dict[str, Any] = {}  # file -> handle; the mapping's life is theirs

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._entries:
            raise CheckpointError(f"checkpoint {self._path} holds no tensor {name!r}")
        file = self._entries[name]["file"]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self._path / file, framework="pt")
            return self._open[file].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name!r} in {self._path / file}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def versions() -> dict[str, str]:
    """Of rlpost, Python and the packages whose versions matter to a run."""
    found = {"rlpost": rlpost.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _index(shards: Sequence[Shard]) -> dict[str, dict]:
    return {
        name: {"file": shard.name, "shape": entry["shape"], "dtype": entry["dtype"]}
        for shard in shards
        for name, entry in shard.entries.items()
    }


def _differences(found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> list[str]:
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    shapes = [
        f"{name} is {list(found[name])} there and {list(expected[name])} here"
        for name in sorted(found.keys() & expected.keys())
        if list(found[name]) != list(expected[name])
    ]
    lists = [("it lacks ", missing), ("it has unknown ", unknown), ("", shapes)]
    return [
        what + ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        for what, names in lists
        if names
    ]


def _remove(directory: Path) -> None:
    """Delete a checkpoint so that no half of it is ever taken for one."""
    doomed = directory.with_name(directory.name.removesuffix(".old") + ".tmp")
    os.rename(directory, doomed)
    shutil.rmtree(doomed)


def _on_rank_0(action: Callable[..., None], *args: Any, failure: str) -> None:
    error = None
    if rank() == 0:
        try:
            action(*args)
        except (OSError, TypeError, ValueError) as problem:
            error = problem
    _agree(error, failure)


def _agree(error: Exception | None, what: str, value: Any = None) -> list[Any]:
    """Every rank's value, or the same CheckpointError everywhere if any rank has an error. Collective."""
    results = all_gather_objects((None if error is None else str(error), value))
    ranks_by_message: dict[str, list[str]] = {}
    for number, (message, _) in enumerate(results):
        if message is not None:
            ranks_by_message.setdefault(message, []).append(str(number))
    if ranks_by_message:
        failed = [f"rank {', '.join(ranks)}: {message}" for message, ranks in ranks_by_message.items()]
        raise CheckpointError(f"{what}: " + "; ".join(failed)) from error
    return [value for _, value in results]
