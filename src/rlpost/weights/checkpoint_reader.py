"""A checkpoint on disk: checked, its numbers read, its tensors memory-mapped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlpost.parallel import rank, world_size
from rlpost.weights.rank_state import read_rank_state
from rlpost.weights.shards import file_crc, tensor_differences

FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or must not be loaded; the same on every rank."""


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
        self._files: dict[str, list[int]] = manifest["files"]
        self._check_sizes()
        if verify:
            self.check_sums()
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
            differences = tensor_differences({name: entry["shape"] for name, entry in entries.items()}, expected)
            if differences:
                raise CheckpointError(f"checkpoint {self.path} is of another model ({kind}): " + "; ".join(differences))
        return _LazyTensors(self.path, entries)

    def check_sums(self, kind: str | None = None) -> None:
        """Read every file, or those of one kind, and compare checksums; each rank every world-th. CheckpointError names
        the files that differ."""
        names = sorted(self._files if kind is None else {entry["file"] for entry in self._tensors[kind].values()})
        mine = names[rank() :: world_size()]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(file_crc, (self.path / name for name in mine)))
        wrong = [name for name, crc in zip(mine, found) if crc != self._files[name][1]]
        if wrong:
            raise CheckpointError("; ".join(f"{name} has another checksum than when it was written" for name in wrong))

    def _check_sizes(self) -> None:
        wrong = []
        for name, (size, _) in sorted(self._files.items()):
            file = self.path / name
            if not file.is_file():
                wrong.append(f"{name} is missing")
            elif file.stat().st_size != size:
                wrong.append(f"{name} has {file.stat().st_size} bytes instead of {size}")
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
