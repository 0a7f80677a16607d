"""Bytes for an engine's processes, where a GPU's memory cannot be shared."""

from __future__ import annotations

import os

import torch
from torch import Tensor


class HostMemory:
    """A file in memory that other processes of this user map by its path, so that no byte goes through a pipe.

    It keeps the size of the largest `put`, and is not on any disk or in /dev/shm, which containers keep small."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def put(self, data: Tensor) -> tuple[str, bool, int]:
        """Copy the uint8 data [n] there; the arguments of `torch.from_file` for whoever reads them, until the next
        `put`."""
        if self._descriptor is None:
            self._descriptor = os.memfd_create("rlpost-bucket")
        where = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        if data.numel() > self._bytes.numel():
            os.ftruncate(self._descriptor, data.numel())
            self._bytes = torch.from_file(where, shared=True, size=data.numel(), dtype=torch.uint8)
        self._bytes[: data.numel()].copy_(data)
        return where, True, data.numel()

    def close(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
