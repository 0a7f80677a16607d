"""Streaming safetensors: tensors are written as they come, one alive at a time, into files of bounded size."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

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
    """One file of a set. Every rank knows what is in it; only the rank that wrote it knows its checksum."""

    name: str
    entries: dict[str, dict] = field(default_factory=dict)  # tensor: {dtype, shape, data_offsets}, as in the header
    data_bytes: int = 0
    header_bytes: int = len(json.dumps({"__metadata__": METADATA}))
    crc: int | None = None  # of header and data

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

    @property
    def file_bytes(self) -> int:
        return 8 + HEADER_BYTES + self.data_bytes

    def _entry(self, tensor: Tensor) -> dict:
        offsets = [self.data_bytes, self.data_bytes + tensor.nbytes]
        return {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}


def _header_item(name: str, entry: dict) -> bytes:
    return json.dumps({name: entry}, ensure_ascii=False).encode() + b", "


def write_shards(
    directory: Path,
    prefix: str,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: int,
    writes: Callable[[int], bool],
) -> tuple[list[Shard], OSError | None]:
    """Stream named tensors into `directory/<prefix>-00000.safetensors`, …, each at most `shard_bytes` of data (a larger
    tensor goes alone). Only the files i with `writes(i)` are written here; the others are planned.

    `tensors` may be a collective iterator, so it is read to its end even after this rank's disk is full: the error is
    returned for all ranks to agree on, not raised. Raises ValueError for a name that comes twice.
    """
    shards: list[Shard] = []
    seen: set[str] = set()
    file: _File | None = None
    error: OSError | None = None
    for name, tensor in tensors:
        if name in seen:
            raise ValueError(f"tensor {name!r} comes twice")
        seen.add(name)
        opens = not shards or not shards[-1].admits(name, tensor, shard_bytes)
        if opens:
            shards.append(Shard(f"{prefix}-{len(shards):05d}.safetensors"))
        shards[-1].add(name, tensor)
        if error is not None or not writes(len(shards) - 1):
            continue
        try:
            if opens:
                if file is not None:
                    file.close()
                file = _File(directory / shards[-1].name, shards[-1])
            file.append(tensor)
        except OSError as failure:
            error = failure
    if file is not None:
        try:
            file.close()
        except OSError as failure:
            error = error or failure
    return shards, error


class _File:
    """A shard being written: a blank header, the tensors' bytes, then the header."""

    def __init__(self, path: Path, shard: Shard):
        self.shard = shard
        self.out = open(path, "wb", buffering=0)  # noqa: SIM115 (it stays open between tensors)
        self.out.seek(8 + HEADER_BYTES)
        self.data_crc = 0

    def append(self, tensor: Tensor) -> None:
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        if flat.numel():
            data = memoryview(flat.view(torch.uint8).numpy())
            self.data_crc = zlib.crc32(data, self.data_crc)
            self._write(data)

    def close(self) -> None:
        try:
            header = self.shard.header()
            self.out.seek(0)
            self._write(memoryview(header))
            os.fsync(self.out.fileno())
            self.shard.crc = zlib.crc32(header, self.data_crc)  # the header last: the data was summed as it went by
        finally:
            self.out.close()

    def _write(self, data: memoryview) -> None:
        while data:  # one system call writes at most 2 GiB, and less when the disk is nearly full
            data = data[self.out.write(data) :]


def file_crc(path: Path) -> int:
    """The checksum of a file, in the order that a shard is written: its data, then its header."""
    crc = 0
    with open(path, "rb") as f:
        header = f.read(8 + HEADER_BYTES)
        while block := f.read(16 * 2**20):
            crc = zlib.crc32(block, crc)
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
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def replace_text(path: Path, text: str) -> None:
    """Replace a small file at once: a reader finds the old text or the new one."""
    beside = path.with_name(path.name + ".tmp")
    write_durably(beside, text.encode())
    os.replace(beside, path)
    sync_directory(path.parent)
