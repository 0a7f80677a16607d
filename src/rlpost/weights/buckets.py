"""Flattened buckets: many named tensors in one buffer, so that a publish is a few large messages; and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from math import prod

import torch
from torch import Tensor

from rlpost.rollout.engine import Bucket, TensorSpec

ALIGNMENT = 16  # bytes: every dtype can be viewed at such an offset
TOGETHER = 32  # tensors copied by one call; they are kept that long


def iter_buckets(
    tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype_of: Callable[[str], torch.dtype]
) -> Iterator[Bucket]:
    """Pack named tensors, cast to `dtype_of(name)`, into buckets of at most `bucket_bytes`.

    A larger tensor travels alone in a bucket of its own size; no bucket is empty. A few tensors at a time are copied
    and forgotten, and so is a bucket before the next is filled: with the consumer's, at most two are alive. Buffers are
    never reused.
    """
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"bucket_bytes={bucket_bytes}: at least {ALIGNMENT}")
    bucket, used = None, 0
    waiting: tuple[list[Tensor], list[Tensor]] = [], []  # views of the buffer, and what goes there
    for name, tensor in tensors:
        spec = TensorSpec(tuple(tensor.shape), dtype_of(name))
        size = prod(spec.shape) * spec.dtype.itemsize
        if bucket is not None and used + size > bucket.buffer.numel():
            _copy(*waiting)
            yield _cut(bucket, used)
            bucket = None
        if bucket is None:
            whole = max(bucket_bytes - bucket_bytes % ALIGNMENT, _aligned(size))  # can be viewed in any dtype
            buffer = torch.empty(whole, dtype=torch.uint8, device=tensor.device)
            bucket, used = Bucket(buffer), 0
        waiting[0].append(_view(bucket.buffer, spec, used))
        waiting[1].append(tensor.detach())
        if len(waiting[0]) == TOGETHER:
            _copy(*waiting)
        bucket.entries.append((name, spec, used))
        used += _aligned(size)
    if bucket is not None:
        _copy(*waiting)
        yield _cut(bucket, used)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _copy(views: list[Tensor], tensors: list[Tensor]) -> None:
    if views:
        torch._foreach_copy_(views, tensors)  # one launch on a GPU for many tensors
    views.clear()
    tensors.clear()


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The bucket's tensors as views of its buffer."""
    for name, spec, offset in bucket.entries:
        yield name, _view(bucket.buffer, spec, offset)


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and values: equal exactly where two tensors are bitwise equal, whatever their strides
    and devices."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def _view(buffer: Tensor, spec: TensorSpec, offset: int) -> Tensor:
    size = prod(spec.shape) * spec.dtype.itemsize
    return buffer[offset : offset + size].view(spec.dtype).view(spec.shape)


def _cut(bucket: Bucket, used: int) -> Bucket:
    return Bucket(bucket.buffer[:used], bucket.entries)
