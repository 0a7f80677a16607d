"""Flattened buckets: many named tensors in one buffer, so that a publish is a few large messages; and digests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from math import prod

import torch
from torch import Tensor

from rlpost.rollout.engine import Bucket, TensorSpec

ALIGNMENT = 16  # bytes: every dtype can be viewed at such an offset


def iter_buckets(
    tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, dtype_of: Callable[[str], torch.dtype]
) -> Iterator[Bucket]:
    """Pack named tensors, cast to `dtype_of(name)`, into buckets of at most `bucket_bytes`.

    A larger tensor travels alone in a bucket of its own size; no bucket is empty. Tensors are copied as they come
    and none is kept, and the generator forgets a bucket before it fills the next: with the consumer's, at most two
    are alive. Buffers are never reused.
    """
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"bucket_bytes={bucket_bytes}: at least {ALIGNMENT}")
    bucket, used = None, 0
    for name, tensor in tensors:
        spec = TensorSpec(tuple(tensor.shape), dtype_of(name))
        size = prod(spec.shape) * spec.dtype.itemsize
        if bucket is not None and used + size > bucket.buffer.numel():
            yield _cut(bucket, used)
            bucket = None
        if bucket is None:
            buffer = torch.empty(max(bucket_bytes, size), dtype=torch.uint8, device=tensor.device)
            bucket, used = Bucket(buffer), 0
        _view(bucket.buffer, spec, used).copy_(tensor.detach())
        bucket.entries.append((name, spec, used))
        used += -(-size // ALIGNMENT) * ALIGNMENT
    if bucket is not None:
        yield _cut(bucket, used)


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
