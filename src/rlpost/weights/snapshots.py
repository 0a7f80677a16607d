"""Named copies of a rank's weights in host memory: the teacher's EMA, a reference, the weights before a swap.

One store per rank, over the fp32 master shards that the rank's optimizer owns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rlpost.parallel import world_size
from rlpost.weights.buckets import tensor_digest

STUDENT = "student"  # names the live weights, unless a copy was saved under this very tag
CHUNK = 2**23  # elements of a difference that are alive at once


class SnapshotStore:
    """Tags over the live weights.

    live: returns the rank's tensors by name; writing to them changes the masters. sync: pushes the masters into the
    model, collectively, so that `load` and `swap` are collective too.

    With CUDA tensors the copies live in pinned memory and travel on a side stream: the device's current stream waits
    for it before its next kernel, the host before it reads.

    Every operation raises ValueError, naming the tensor, where keys, shapes or dtypes differ; KeyError for an unknown
    tag; RuntimeError where weights would be read or written while `swap` has others in the model.
    """

    def __init__(self, live: Callable[[], dict[str, Tensor]], sync: Callable[[], None]):
        self._live, self._sync = live, sync
        self._tags: dict[str, dict[str, Tensor]] = {}
        self._swapped: str | None = None  # the tag in the model right now
        self._side: torch.cuda.Stream | None = None

    def tags(self) -> list[str]:
        return list(self._tags)

    def tensors(self, tag: str) -> dict[str, Tensor]:
        """The copy's own tensors (fp32 where the masters are), or the live ones for "student"."""
        found = self._find(tag)
        self._wait()
        return found

    def save(self, tag: str) -> None:
        """Copy the live weights to `tag`, which may exist."""
        self._refuse_while_swapped(f"save({tag!r})")
        self._store(tag, self._live())

    def load(self, tag: str) -> None:
        """Copy `tag` into the live weights and the model."""
        self._refuse_while_swapped(f"load({tag!r})")
        self._into_model(tag, self._find(tag))

    def copy(self, src: str, dst: str) -> None:
        if src != dst:
            self._store(dst, self._find(src))

    def put(self, tag: str, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Fill `tag` from elsewhere (a checkpoint), checked against the live weights."""
        given = dict(tensors)
        check_match(given, self._live(), f"the tensors for {tag!r}", "the live weights")
        self._store(tag, given)

    def ema(self, src: str, dst: str, alpha: float) -> None:
        """dst ← (1 − alpha)·dst + alpha·src in fp32; alpha is the share of `src`. Tensors that are not floating are
        copied, and alpha=1 copies all bits."""
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha} is not allowed; it is the share of {src!r}, 0 < alpha ≤ 1")
        source, target = self._find(src), self._tags[self._known(dst)]
        check_match(source, target, repr(src), repr(dst))
        for name, tensor in target.items():
            if tensor.dtype in (torch.float16, torch.bfloat16):
                raise ValueError(f"the EMA is kept in fp32, but {dst!r} has {name!r} in {tensor.dtype}")
        if alpha == 1:
            return self._store(dst, source)
        if any(tensor.is_cuda for tensor in source.values()):
            return self._ema_on_device(source, target, alpha)
        self._wait()
        moving = [name for name, tensor in target.items() if tensor.is_floating_point() and tensor.numel()]
        torch._foreach_lerp_([target[n] for n in moving], [source[n].detach() for n in moving], alpha)
        for name in target.keys() - set(moving):
            target[name].copy_(source[name])

    def distance_parts(
        self, tag: str, student: str = STUDENT, *, only: Collection[str] | None = None
    ) -> tuple[float, float]:
        """(Σ (student − tag)², Σ student²) over this rank's floating tensors: ranks add their parts, and
        `ema/distance` is the square root of the ratio. only: the names that no other rank counts (None: all)."""
        theirs, ours = self._find(tag), self._find(student)
        check_match(theirs, ours, repr(tag), repr(student))
        self._wait()
        difference = norm = 0.0
        for name, tensor in ours.items():
            if not tensor.is_floating_point() or (only is not None and name not in only):
                continue
            for a, b in zip(tensor.detach().reshape(-1).split(CHUNK), theirs[name].reshape(-1).split(CHUNK)):
                # `sum` adds pairwise, which fp32 needs here: a dot product of so many is off by half a percent.
                difference += (a - b.to(a.device)).square_().sum().item()
                norm += a.square().sum().item()
        return difference, norm

    def hash(self, tag: str) -> dict[str, str]:
        """A digest per tensor."""
        return {name: tensor_digest(tensor) for name, tensor in self.tensors(tag).items()}

    def drop(self, tag: str) -> None:
        self._known(tag)
        if tag == self._swapped:
            raise RuntimeError(f"drop({tag!r}) inside swap({tag!r})")
        self._wait()
        del self._tags[tag]

    @contextmanager
    def swap(self, tag: str) -> Iterator[None]:
        """Inside, the model holds `tag`; after, also after an exception, the former weights again, bit by bit. What is
        written to the live weights inside is lost. Costs one more copy of the weights meanwhile.

        A rank that fails alone must not wait for the others in `sync`: after an exception with several ranks the live
        weights are the former ones, and the model has them again with the next `sync` (the phase's retry, or none)."""
        self._refuse_while_swapped(f"swap({tag!r})")
        loaded = self._find(tag)
        live = self._live()
        check_match(loaded, live, repr(tag), "the live weights")
        former = {name: _host_like(tensor) for name, tensor in live.items()}
        self._copy_all(live, former)
        self._swapped = tag
        try:
            self._into_model(tag, loaded)
            yield
            self._into_model("the former weights", former)
        except BaseException:
            self._copy_all(former, live)
            if world_size() == 1:
                self._sync()
            raise
        finally:
            self._swapped = None
            self._wait()  # `former` goes back to the allocator only now

    def _find(self, tag: str) -> dict[str, Tensor]:
        if tag == STUDENT and tag not in self._tags:
            self._refuse_while_swapped(f"reading {tag!r}")
            return self._live()
        return self._tags[self._known(tag)]

    def _known(self, tag: str) -> str:
        if tag not in self._tags:
            raise KeyError(f"no snapshot {tag!r}; there are: {', '.join(self._tags) or 'none'}")
        return tag

    def _refuse_while_swapped(self, operation: str) -> None:
        if self._swapped is not None:
            raise RuntimeError(f"{operation} inside swap({self._swapped!r}): the model holds other weights there")

    def _store(self, tag: str, source: Mapping[str, Tensor]) -> None:
        target = self._tags.get(tag)
        if target is None:
            target = {name: _host_like(tensor, pin=self._on_cuda()) for name, tensor in source.items()}
        check_match(source, target, "the weights", repr(tag))
        self._copy_all(source, target)
        self._tags[tag] = target

    def _into_model(self, tag: str, source: Mapping[str, Tensor]) -> None:
        live = self._live()
        check_match(source, live, repr(tag), "the live weights")
        self._copy_all(source, live)
        self._sync()

    def _on_cuda(self) -> bool:
        return any(tensor.is_cuda for tensor in self._live().values())

    @torch.no_grad()
    def _copy_all(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        with self._side_stream(self._on_cuda()):
            for name, tensor in target.items():
                if not (tensor.is_cuda or source[name].is_cuda):
                    self._wait()  # the host does this copy, at once
                tensor.copy_(source[name], non_blocking=True)

    @torch.no_grad()
    def _ema_on_device(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor], alpha: float) -> None:
        """The device is faster than the host at this even with both ways of the bus; one tensor is there at a time."""
        with self._side_stream(True):
            for name, tensor in target.items():
                moved = source[name]
                if tensor.is_floating_point():
                    moved = tensor.to(moved.device, non_blocking=True).lerp_(moved, alpha)
                tensor.copy_(moved, non_blocking=True)

    @contextmanager
    def _side_stream(self, on_cuda: bool) -> Iterator[None]:
        """Runs the block on a stream of its own, after what the current stream has queued and before what comes."""
        if not on_cuda:
            yield
            return
        if self._side is None:
            self._side = torch.cuda.Stream()
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield
        torch.cuda.current_stream().wait_stream(self._side)

    def _wait(self) -> None:
        if self._side is not None:
            self._side.synchronize()


def check_match(
    given: Mapping[str, Tensor], expected: Mapping[str, Tensor], given_name: str, expected_name: str
) -> None:
    """Raise ValueError naming the first tensor whose presence, shape or dtype differs."""
    for name in [*expected, *given]:
        if name not in given or name not in expected:
            where, absent = (expected_name, given_name) if name in expected else (given_name, expected_name)
            raise ValueError(f"tensor {name!r} is in {where} but not in {absent}")
        a, b = given[name], expected[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(
                f"tensor {name!r} is {a.dtype} {list(a.shape)} in {given_name} "
                f"but {b.dtype} {list(b.shape)} in {expected_name}"
            )


def _host_like(tensor: Tensor, *, pin: bool | None = None) -> Tensor:
    pin = tensor.is_cuda if pin is None else pin
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
