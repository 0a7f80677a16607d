"""Streaming safetensors: tensors are written as they come, one alive at a time, into files of bounded size."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from rlpost.files import naming

# The header of a safetensors file stands before the data but is known only after it. The format allows trailing blanks
# in the header, so a fixed room is left and filled at the end; a file whose room is full is closed early.
HEADER_BYTES = 64 * 1024
METADATA = {"format": "pt"}  # without it Transformers refuses the file

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass
class Shard:
    """What stands in one file of a set. Every rank knows it; one writes it."""

    name: str
    entries: dict[str, dict] = field(default_factory=dict)  # tensor: {dtype, shape, data_offsets}, as in the header
    data_bytes: int = 0
    header_bytes: int = len(json.dumps({"__metadata__": METADATA}))

    def admits(self, name: str, tensor: Tensor, limit: int) -> bool:
        """Whether the tensor may still come into this file: size, room in the header, alignment of its elements."""
        return not self.entries or (
            self.data_bytes + tensor.nbytes <= limit
            and self.header_bytes + len(_header_item(name, self._entry(tensor))) <= HEADER_BYTES
            and self.data_bytes % tensor.element_size() == 0
        )

    def add(self, name: str, tensor: Tensor) -> None:
        self.entries[name] = self._entry(tensor)
        self.header_bytes += len(_header_item(name, self.entries[name]))
        self.data_bytes += tensor.nbytes

    def header(self) -> bytes:
        text = json.dumps({"__metadata__": METADATA, **self.entries}, ensure_ascii=False).encode()
        return HEADER_BYTES.to_bytes(8, "little") + text.ljust(HEADER_BYTES)

    def _entry(self, tensor: Tensor) -> dict:
        offsets = [self.data_bytes, self.data_bytes + tensor.nbytes]
        return {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}


def _header_item(name: str, entry: dict) -> bytes:
    return json.dumps({name: entry}, ensure_ascii=False).encode() + b", "


def assign_shards(
    prefix: str, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int
) -> Iterator[tuple[Shard, Tensor]]:
    """Each tensor with its place in `<prefix>-00000.safetensors`, …, which hold at most `shard_bytes` of data (a larger
    tensor goes alone). A shard is complete when the next one comes. Raises ValueError for a name that comes twice.
    """
    shard, number = None, 0
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise ValueError(f"tensor {name!r} comes twice")
        seen.add(name)
        if shard is None or not shard.admits(name, tensor, shard_bytes):
            shard, number = Shard(f"{prefix}-{number:05d}.safetensors"), number + 1
        shard.add(name, tensor)
        yield shard, tensor


class ShardWriter:
    """Writes tensors into the files of their shards as they come, one shard after the other, and makes them durable.

    The tensors may come from a collective iterator, which must be read to its end even where this rank's disk is full:
    `put` and `close` keep an OSError in `error` and write nothing more, for all ranks to agree on. `files` has the size
    and checksum of each finished file.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.files: dict[str, list[int]] = {}
        self.error: OSError | None = None
        self._file: _File | None = None
        self._syncing: list[Future[None]] = []
        # Sums a tensor while it is written, and waits for the disk while the next file is written.
        self._helpers = ThreadPoolExecutor(2, thread_name_prefix="rlpost-shards")

    def put(self, shard: Shard, tensor: Tensor) -> None:
        if self.error is not None:
            return
        try:
            if self._file is None or self._file.shard is not shard:
                self._finish_file()
                self._file = _File(self.directory / shard.name, shard)
            self._file.append(tensor, self._helpers)
        except OSError as error:
            self.error = error

    def close(self) -> None:
        try:
            self._finish_file()
            for syncing in self._syncing:
                syncing.result()
        except OSError as error:
            self.error = self.error or error
        self._helpers.shutdown()

    def _finish_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.write_header()
            self.files[file.shard.name] = [8 + HEADER_BYTES + file.shard.data_bytes, file.crc]
            self._syncing.append(self._helpers.submit(file.sync_and_close))


class _File:
    """A shard being written: a blank header, the tensors' bytes, then the header."""

    def __init__(self, path: Path, shard: Shard):
        self.shard = shard
        self.out = open(path, "wb", buffering=0)  # noqa: SIM115 (it stays open between tensors)
        self.out.seek(8 + HEADER_BYTES)
        self.crc = 0

    def append(self, tensor: Tensor, helpers: ThreadPoolExecutor) -> None:
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        if flat.numel():
            data = memoryview(flat.view(torch.uint8).numpy())
            summing = helpers.submit(zlib.crc32, data, self.crc)
            try:
                self._write(data)
            finally:
                self.crc = summing.result()

    def write_header(self) -> None:
        header = self.shard.header()
        self.crc = zlib.crc32(header, self.crc)  # the header last: the data was summed as it went by
        self.out.seek(0)
        self._write(memoryview(header))

    def sync_and_close(self) -> None:
        try:
            os.fsync(self.out.fileno())
        finally:
            self.out.close()

    def _write(self, data: memoryview) -> None:
        while data:  # one system call writes at most 2 GiB, and less when the disk is nearly full
            data = data[self.out.write(data) :]


def tensor_differences(found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> list[str]:
    """How the tensors found differ from those of the model at hand, by name; at most five names of each kind."""
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


def bytes_crc(data: bytes) -> int:
    """What `file_crc` gives for a file of this content."""
    return zlib.crc32(data[: 8 + HEADER_BYTES], zlib.crc32(data[8 + HEADER_BYTES :]))


def file_crc(path: Path) -> int:
    """The checksum of a file, in the order that a shard is written: its data, then its header."""
    crc, block = 0, bytearray(2**20)  # it stays in the cache of a core
    with open(path, "rb", buffering=0) as f:
        header = f.read(8 + HEADER_BYTES)
        while got := f.readinto(block):
            crc = zlib.crc32(memoryview(block)[:got], crc)
    return zlib.crc32(header, crc)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file and wait until it is on disk."""
    with naming(path), open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def replace_text(path: Path, text: str) -> None:
    """Replace a small file at once: a reader finds the old text or the new one."""
    beside = path.with_name(path.name + ".tmp")
    write_durably(beside, text.encode())
    os.replace(beside, path)
    sync_directory(path.parent)
