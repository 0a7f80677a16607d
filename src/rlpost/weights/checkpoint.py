"""Checkpoints: whole fp32 tensors under Hugging Face names, which any layout of ranks can load, written atomically.

    checkpoints/latest                          one line, "step_000010"
    checkpoints/step_000010/manifest.json       format, step, world, versions, config, tensors by kind, files
                            state.json          the trainer's state
                            rank_00000.json     what each rank keeps for itself (with its tensors beside it)
                            master-00000.safetensors …

A checkpoint is written under `step_000010.tmp`, made durable, and renamed when it is complete on every rank, before
`latest` points to it and older ones go: a kill at any moment leaves one that loads.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rlpost
from rlpost.parallel import all_gather_objects, rank, world_size
from rlpost.weights.checkpoint_reader import FORMAT, Checkpoint, CheckpointError
from rlpost.weights.rank_state import encode_rank_state
from rlpost.weights.shards import (
    Shard,
    ShardWriter,
    assign_shards,
    bytes_crc,
    replace_text,
    sync_directory,
    write_durably,
)

# Whose versions matter to a run.
PACKAGES = ("torch", "megatron-core", "transformers", "safetensors", "sglang")
WRITE_LIMIT = timedelta(hours=1)  # for all ranks' files; a rank that takes longer counts as failed
Tensors = Callable[[], Iterator[tuple[str, Tensor]]]
Held = deque[tuple[Shard, Tensor]]


class CheckpointStore:
    """The checkpoints of one run. keep: how many stay. shard_bytes: data per file.

    Every rank builds one and calls its methods together.
    """

    def __init__(self, directory: str | Path, keep: int = 2, *, shard_bytes: int = 2**30):
        if keep < 1:
            raise ValueError(f"keep={keep} is not allowed; at least one checkpoint must stay (keep ≥ 1)")
        self.directory, self.keep, self.shard_bytes = Path(directory), keep, shard_bytes
        self._in_flight: _BackgroundWrite | None = None
        self._host: list[Tensor] = []  # this rank's copies of the last save in the background

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
        background: bool = False,
        keep_also: int | None = None,
    ) -> Path:
        """Write the checkpoint of this step. Collective.

        tensors: kind ("master", "exp_avg", "tag.teacher", …) -> a function returning a collective iterator over
        (name, whole tensor): every rank reads it to its end, and rank r writes each world-th file. state: JSON values,
        rank 0's. rank_state: JSON values, tuples and tensors, of each rank. Raises CheckpointError on all ranks, naming
        the rank, where one cannot write; the former checkpoint is untouched then. keep_also: an earlier step that stays
        beside the last `keep`.

        background: return once everything is copied to host memory (each rank its files) and let a thread write it;
        `poll` or `finish` raises what goes wrong then. One write is in flight at most: a save waits for the former.
        """
        self.finish()
        draft = self._begin(step, state, rank_state or {}, config)
        draft.keep_also = keep_also
        held: Held = deque()
        writer = ShardWriter(draft.beside)
        planned = 0
        for kind, iterate in tensors.items():
            shards = draft.shards[kind] = []
            for shard, tensor in assign_shards(kind, iterate(), self.shard_bytes):
                if not shards or shards[-1] is not shard:
                    shards.append(shard)
                if (planned + len(shards) - 1) % world_size() != rank():
                    continue
                if background:
                    held.append((shard, self._copied(tensor, len(held))))
                else:
                    writer.put(shard, tensor)
            planned += len(shards)
        self._in_flight = _BackgroundWrite(self, draft, writer, held)
        if background:
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()  # the copies
            self._in_flight.start()
        else:
            self._in_flight.run()
            self.finish()
        return draft.final

    def _copied(self, tensor: Tensor, place: int) -> Tensor:
        """A copy in host memory that stays for the next save: new memory would cost more time than the copy."""
        if place == len(self._host):
            self._host.append(torch.empty(0))
        kept = self._host[place]
        if (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._host[place] = kept
        return kept.copy_(tensor.detach(), non_blocking=True)

    def poll(self) -> None:
        """Learn whether a save in the background has ended. Collective, and free where none is in flight. Raises its
        CheckpointError on all ranks."""
        if self._in_flight is not None and all(all_gather_objects(self._in_flight.ended.is_set())):
            self.finish()

    def finish(self) -> None:
        """Wait for a save in the background. Collective. Raises its CheckpointError on all ranks."""
        write, self._in_flight = self._in_flight, None
        if write is not None:
            write.ended.wait()
            _agree(write.error, f"checkpoint {write.draft.final}")

    def _begin(
        self,
        step: int,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        config: Mapping[str, Any] | None,
    ) -> _Draft:
        final = self.directory / f"step_{step:06d}"
        beside = final.with_name(final.name + ".tmp")
        draft = _Draft(step, final, beside, config)
        error: Exception | None = None
        try:
            draft.small = encode_rank_state(rank(), rank_state)
            if rank() == 0:
                draft.small["state.json"] = json.dumps(dict(state)).encode()
                self._prepare(beside)
        except (OSError, TypeError, ValueError) as failure:
            error = failure
        draft.token = _agree(error, f"checkpoint {final}", value=uuid.uuid4().hex)[0]
        return draft

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
                raise CheckpointError("there is none")
            checkpoint, error = Checkpoint(path, verify=verify), None
        except (CheckpointError, OSError) as failure:
            checkpoint, error = None, failure
        others = [str(other) for other in self.steps() if other != wanted]
        _agree(error, f"loading checkpoint {path}" + (f" (others: step {', '.join(others)})" if others else ""))
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

    def commit(self, draft: _Draft, files: Mapping[str, Sequence[int]]) -> None:
        """Rank 0, when every rank's files are on disk: manifest, rename, pointer; then older ones go."""
        beside, final = draft.beside, draft.final
        write_durably(beside / "manifest.json", json.dumps(draft.manifest(files)).encode())
        sync_directory(beside)
        if final.is_dir():  # a directory cannot be replaced by a rename; `load` and `_prepare` know `.old`
            os.rename(final, final.with_name(final.name + ".old"))
        os.rename(beside, final)
        sync_directory(self.directory)
        replace_text(self.directory / "latest", final.name + "\n")
        if (old := final.with_name(final.name + ".old")).is_dir():
            _remove(old)
        # Later steps belong to a future that was given up by resuming from an earlier checkpoint.
        former = [step for step in self.steps() if step < draft.step]
        kept = {draft.step, draft.keep_also, *former[max(0, len(former) + 1 - self.keep) :]}
        for step in self.steps():
            if step not in kept:
                _remove(self.directory / f"step_{step:06d}")


@dataclass
class _Draft:
    """A checkpoint before it is complete."""

    step: int
    final: Path
    beside: Path
    config: Mapping[str, Any] | None
    small: dict[str, bytes] = field(default_factory=dict)  # this rank's small files
    shards: dict[str, list[Shard]] = field(default_factory=dict)  # by kind, all ranks'
    token: str = ""  # of this save, the same on every rank
    keep_also: int | None = None  # an earlier step that stays

    def manifest(self, files: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": self.step,
            "world": world_size(),
            "versions": versions(),
            "config": self.config,
            "tensors": {kind: _index(part) for kind, part in self.shards.items()},
            "files": files,
        }


class _BackgroundWrite:
    """From tensors in host memory to a complete checkpoint, without a collective: the trainer has its own meanwhile.

    Each rank writes its files and tells rank 0 through the job's key-value store; rank 0 commits when all have.
    """

    def __init__(self, store: CheckpointStore, draft: _Draft, writer: ShardWriter, held: Held):
        self.store, self.draft, self._writer, self._held = store, draft, writer, held
        self.error: Exception | None = None  # this rank's
        self.ended = threading.Event()

    def start(self) -> None:
        # No daemon: where the run ends by an error meanwhile, the process stays until the checkpoint is complete.
        threading.Thread(target=self.run, name="rlpost-checkpoint").start()

    def run(self) -> None:
        try:
            self._write()
            parts = self._tell_rank_0()
            if rank() == 0 and all(message is None for message, _ in parts):
                files = {name: entry for _, part in parts for name, entry in part.items()}
                self.store.commit(self.draft, files)
        except Exception as error:  # whatever it is, `finish` raises it in the trainer's thread
            self.error = self.error or error
        finally:
            self._held.clear()
            if rank() == 0:
                shutil.rmtree(self.draft.beside, ignore_errors=True)  # there only after a failure
            self.ended.set()

    def _write(self) -> None:
        while self._held:
            self._writer.put(*self._held.popleft())
        self._writer.close()
        self.error = self._writer.error
        if self.error is not None:
            return
        try:
            for name, data in self.draft.small.items():
                write_durably(self.draft.beside / name, data)
                self._writer.files[name] = [len(data), bytes_crc(data)]
        except OSError as error:
            self.error = error

    def _tell_rank_0(self) -> list[tuple[str | None, dict[str, list[int]]]]:
        """Every rank's (why it could not, {file: [size, checksum]}), on rank 0."""
        mine = (None if self.error is None else str(self.error), self._writer.files)
        if world_size() == 1:
            return [mine]
        mailbox = dist.distributed_c10d._get_default_store().clone()  # a connection of its own
        mailbox.set_timeout(WRITE_LIMIT)
        keys = [f"rlpost/checkpoint/{self.draft.token}/{number}" for number in range(world_size())]
        mailbox.set(keys[rank()], json.dumps(mine))
        if rank() != 0:
            return []
        return [json.loads(mailbox.get(key)) for key in keys]


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Of rlpost, Python and those of the packages that are installed."""
    found = {"rlpost": rlpost.__version__, "python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _index(shards: Sequence[Shard]) -> dict[str, dict]:
    return {
        name: {"file": shard.name, "shape": entry["shape"], "dtype": entry["dtype"]}
        for shard in shards
        for name, entry in shard.entries.items()
    }


def _remove(directory: Path) -> None:
    """Delete a checkpoint so that no half of it is ever taken for one."""
    doomed = directory.with_name(directory.name.removesuffix(".old") + ".tmp")
    os.rename(directory, doomed)
    shutil.rmtree(doomed)


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
