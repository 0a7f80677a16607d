"""What a rank keeps on its device, and moves off it and back between phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from rlpost.failures import device_bytes

if TYPE_CHECKING:
    from rlpost.rollout.engine import Engine, Tag


class Resident(Protocol):
    """Something that can be on the device or off it."""

    @property
    def on_device(self) -> bool: ...

    def bytes(self) -> int:
        """What it takes on the device, whether it is there or not."""
        ...

    def onload(self) -> int:
        """The number of bytes that were copied."""
        ...

    def offload(self) -> int: ...


@dataclass
class Unmoved:
    """A resident where there is no device to move from: only its size is known."""

    size: Callable[[], int]
    on_device = True

    def bytes(self) -> int:
        return self.size()

    def onload(self) -> int:
        return 0

    def offload(self) -> int:
        return 0


class Moved:
    """Tensors that leave the device for (pinned) host memory and come back bit by bit. Whatever is a view of them stays
    one; while they are away it must not be touched, which is what `require` is for.

    what: it is, in errors. tensors: the live ones, asked at each departure (Adam makes its moments at the first step).
    keep: false for what nobody reads again (gradients): nothing is copied, and they come back as zeros.
    """

    def __init__(self, what: str, tensors: Callable[[], Iterable[Tensor]], *, keep: bool = True):
        self.what, self.keep = what, keep
        self._tensors = tensors
        self._away: list[tuple[torch.UntypedStorage, int]] = []  # and the bytes of each
        self._host: list[Tensor] = []  # uint8, one to each storage; they stay for the next time

    @property
    def on_device(self) -> bool:
        return not self._away

    def bytes(self) -> int:
        if self._away:
            return sum(size for _, size in self._away)
        return sum(storage.nbytes() for storage in self._storages())

    def require(self) -> None:
        """RuntimeError where the tensors are away: a kernel that touched them would bring down the process."""
        if self._away:
            raise RuntimeError(f"{self.what}: in host memory now; the phase that uses it needs it among its residents")

    def offload(self) -> int:
        if self._away:
            return 0
        leaving = self._storages()
        if self.keep:
            self._host = [_host_buffer(i, storage, self._host) for i, storage in enumerate(leaving)]
            for storage, host in zip(leaving, self._host):
                host.copy_(_as_bytes(storage), non_blocking=True)
        if any(storage.device.type == "cuda" for storage in leaving):
            torch.cuda.synchronize()  # other streams may still read them, too
        self._away = [(storage, storage.nbytes()) for storage in leaving]
        for storage in leaving:
            storage.resize_(0)
        return self.bytes() if self.keep else 0

    def onload(self) -> int:
        copied = self.bytes() if self._away and self.keep else 0
        for i, (storage, size) in enumerate(self._away):
            storage.resize_(size)
            if self.keep:
                _as_bytes(storage).copy_(self._host[i], non_blocking=True)
            else:
                _as_bytes(storage).zero_()
        self._away = []
        return copied

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Inside, the tensors are on the device; after, where they were before."""
        away = not self.on_device
        self.onload()
        try:
            yield
        finally:
            if away:
                self.offload()

    def _storages(self) -> list[torch.UntypedStorage]:
        """Each once, however many tensors are views of it."""
        found = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found.setdefault(storage.data_ptr(), storage)
        return list(found.values())


@dataclass
class Together:
    """Several that move as one."""

    parts: Sequence[Resident]

    @property
    def on_device(self) -> bool:
        return all(part.on_device for part in self.parts)

    def bytes(self) -> int:
        return sum(part.bytes() for part in self.parts)

    def onload(self) -> int:
        return sum(part.onload() for part in self.parts)

    def offload(self) -> int:
        return sum(part.offload() for part in self.parts)


class EngineMemory:
    """What an engine gives back under these tags while it sleeps."""

    def __init__(self, engine: Engine, tags: Sequence[Tag], size: Callable[[], int]):
        """size: bytes as long as they were not measured, which happens when the engine first sleeps."""
        self._engine, self._tags, self._size = engine, tuple(tags), size
        self._asleep = False
        self._measured: int | None = None

    @property
    def on_device(self) -> bool:
        return self._engine.started and not self._asleep

    def bytes(self) -> int:
        return self._size() if self._measured is None else self._measured

    def onload(self) -> int:
        if self._asleep:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # an engine of another process has no use for what this allocator hoards
            self._engine.wake(self._tags)
            self._asleep = False
        return 0  # its weights come with the next publish

    def offload(self) -> int:
        if self.on_device:
            before = device_bytes()
            self._engine.sleep(self._tags)
            self._asleep = True
            given = before - device_bytes()
            if self._measured is None and given > 0:  # an engine in this process gives to the allocator, not the device
                self._measured = given
        return 0


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_buffer(i: int, storage: torch.UntypedStorage, had: Sequence[Tensor]) -> Tensor:
    if i < len(had) and len(had[i]) == storage.nbytes():
        return had[i]
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
