"""Loading a bucket into SGLang's model: by its own `load_weights` once, afterwards by the copies that this made.

`load_weights` finds the place of each tensor in Python (fused and sharded parameters, experts), which takes longer than
to write it, and finds the same places every time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlpost.rollout.engine import Bucket
from rlpost.weights.buckets import unpack

CONSTANTS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)  # rows that pad the vocabulary


class BucketLoader:
    """Loads buckets, whose buffers are on the model's device, into one model."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._copies: dict[tuple, _Copies | None] = {}  # by a bucket's entries; None: not to be replayed
        self._addresses: list[int] = []

    def begin(self) -> None:
        """Before a publish: where a tensor of the model has moved, no place is known any more."""
        addresses = [tensor.data_ptr() for tensor in self._state()]
        if addresses != self._addresses:
            self._copies.clear()
            self._addresses = addresses

    def load(self, bucket: Bucket) -> bool:
        """Whether it took copies seen before."""
        key = tuple(bucket.entries)
        if copies := self._copies.get(key):
            copies.replay(bucket.buffer)
            return True
        if key in self._copies:
            self.model.load_weights(unpack(bucket))
        else:
            with _Recorder() as recorder:
                self.model.load_weights(unpack(bucket))
            self._copies[key] = recorder.copies(bucket, self._state())
        return False

    def _state(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]


@dataclass
class _Copies:
    """What the loading of a bucket writes: no place twice, so in any order."""

    targets: list[Tensor] = field(default_factory=list)
    sources: list[tuple[torch.dtype, tuple, tuple, int]] = field(default_factory=list)  # the last: elements into buffer
    constants: list[tuple[Tensor, float]] = field(default_factory=list)

    @torch.no_grad()
    def replay(self, buffer: Tensor) -> None:
        sources = [
            buffer.view(dtype).as_strided(size, stride, buffer.storage_offset() // dtype.itemsize + offset)
            for dtype, size, stride, offset in self.sources
        ]
        torch._foreach_copy_(self.targets, sources)
        for target, value in self.constants:
            target.fill_(value)


class _Recorder(TorchDispatchMode):
    """Notes what this thread writes."""

    def __init__(self) -> None:
        super().__init__()
        self._written: list[tuple[Tensor, Tensor | float]] = []
        self._only_copies = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._written.append((args[0], args[1]))
        elif func in CONSTANTS:
            self._written.append((args[0], args[1] if len(args) > 1 else 0.0))
        else:
            self._only_copies &= func.is_view
        return func(*args, **(kwargs or {}))

    def copies(self, bucket: Bucket, state: Sequence[Tensor]) -> _Copies | None:
        """None where anything but plain copies out of the bucket and constants was seen, where a tensor of the bucket
        was not seen to go anywhere (another thread may have written it), or where one place was written twice."""
        written = [(target, value) for target, value in self._written if target.numel()]
        model = {tensor.untyped_storage().data_ptr() for tensor in state}
        starts = [offset for _, _, offset in bucket.entries]
        copies, spans, arrived = _Copies(), [], set()
        for target, value in written:
            if not target.is_contiguous() or target.untyped_storage().data_ptr() not in model:
                return None
            spans.append((target.data_ptr(), target.data_ptr() + target.nbytes))
            if not isinstance(value, Tensor):
                copies.constants.append((target, value))
                continue
            of_bucket = value.untyped_storage().data_ptr() == bucket.buffer.untyped_storage().data_ptr()
            if not of_bucket or (value.dtype, value.shape) != (target.dtype, target.shape):
                return None
            offset = value.storage_offset() - bucket.buffer.storage_offset() // value.dtype.itemsize
            copies.targets.append(target)
            copies.sources.append((value.dtype, tuple(value.shape), value.stride(), offset))
            arrived.add(bisect_right(starts, offset * value.dtype.itemsize) - 1)
        spans.sort()
        overlap = any(end > begin for (_, end), (begin, _) in pairwise(spans))
        return copies if self._only_copies and len(arrived) == len(starts) and not overlap else None
