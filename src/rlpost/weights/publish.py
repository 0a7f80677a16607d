"""Publishing: the trained weights reach every rank's engine under one version, or none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlpost.parallel import all_gather_objects, gloo_group
from rlpost.rollout.engine import Engine
from rlpost.weights.buckets import iter_buckets, tensor_digest

log = logging.getLogger(__name__)

VERIFY = ("off", "first", "always")
T = TypeVar("T")


class PublishError(RuntimeError):
    """A publish failed on some rank: the same message on every rank. The version is unchanged, and where anything was
    sent, all engines stay paused."""


class WeightSource(Protocol):
    """What has weights to publish: the policy, or a teacher."""

    def hf_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.hf_tensors`."""
        ...


class Publisher:
    """Sends the policy's weights to the engines of this rank.

    engines: one, several (each gets every bucket), or none (a rank that only takes part in the gathering).
    bucket_bytes: see `iter_buckets`. verify: compare digests of what was sent with what the engine reads back after the
    `first` publish, `always`, or never (`off`). retries: further attempts of a failed publish.
    Every rank builds a Publisher and calls `publish` at the same points.

    Attributes: version, the last committed one; named, the version that the policy's weights last had, also before a
    resumed run has published them; served, whose weights the engines were last given, None where that failed.
    """

    def __init__(
        self,
        policy: WeightSource,
        engines: Engine | Sequence[Engine],
        *,
        bucket_bytes: int = 512 * 2**20,
        verify: str = "off",
        retries: int = 1,
    ):
        if verify not in VERIFY:
            raise ValueError(f"publish.verify={verify!r}: one of {', '.join(VERIFY)}")
        if retries < 0:
            raise ValueError(f"publish.retries={retries}: 0 or more")
        self.policy = policy
        self.engines = list(engines) if isinstance(engines, Sequence) else [engines]
        self.bucket_bytes, self.verify, self.retries = bucket_bytes, verify, retries
        self.version = self.named = 0
        self.served: WeightSource | None = None
        self._checked = self._verified = False
        # Agreement must not share a group with the policy's collectives, nor need a GPU.
        self._group = gloo_group() if dist.is_initialized() and dist.get_world_size() > 1 else None

    def resume(self, version: int) -> None:
        """Before the first publish of a resumed run, which brings the very weights that this version already named."""
        self.version, self.named = max(0, version - 1), version

    def publish(self, source: WeightSource | None = None) -> dict[str, float]:
        """Pause all engines, send every tensor, and commit `version + 1` everywhere. Collective.

        source: whose weights, those of the policy by default. Others, with the same names and shapes, take the next
        version as well, so that no version ever means two sets of weights.

        Returns `publish/seconds`, `publish/bytes` (sent to this rank's engines) and `publish/version`.
        Raises PublishError, the same on every rank, where names, shapes or dtypes do not fit (before anything is sent)
        or where a rank failed in each attempt.
        """
        start = time.perf_counter()
        if not self._checked:
            self._specs = self.engines[0].expected_tensors() if self.engines else {}
            self._dtype = self._common_dtype()
            self._together("match the weights", self._compare_names)
            self._checked = True
        self.served, source = None, self.policy if source is None else source
        for attempt in range(self.retries + 1):
            try:
                sent = self._attempt(source, self.version + 1)
                break
            except PublishError as error:
                if attempt == self.retries:
                    raise
                log.warning("%s; attempt %d of %d follows", error, attempt + 2, self.retries + 1)
        self.version += 1
        self.served = source
        if source is self.policy:
            self.named = self.version
        seconds = time.perf_counter() - start
        return {"publish/seconds": seconds, "publish/bytes": float(sent), "publish/version": float(self.version)}

    def _attempt(self, source: WeightSource, candidate: int) -> int:
        verify = self.verify == "always" or (self.verify == "first" and not self._verified)
        sent = self._together("send the weights", lambda: self._send(source, verify))
        try:
            self._together("commit the weights", lambda: self._commit(candidate))
        except PublishError:
            # Some engines may serve the new version while others do not.
            self._together("pause the engines", self._pause)
            raise
        self._verified |= verify
        return sent

    def _send(self, source: WeightSource, verify: bool) -> int:
        """Bring every tensor to every engine and flush; the bytes sent.

        The source's iterator is collective: a rank whose engine fails still iterates to the end, so that the others
        are not left in a gather.
        """
        tensors = iter(source.hf_tensors(self._dtype))
        try:
            if not self.engines:
                return 0
            self._pause()
            digests: dict[str, str] = {}
            sending = self._with_digests(tensors, digests) if verify else tensors
            sent = 0
            for bucket in iter_buckets(sending, self.bucket_bytes, self._dtype_of):
                for engine in self.engines:
                    engine.load_bucket(bucket)
                    sent += bucket.buffer.numel()
            for engine in self.engines:
                engine.flush()
                if verify:
                    _compare_digests(digests, engine.digest())
            return sent
        finally:
            for _ in tensors:
                pass

    def _pause(self) -> None:
        for engine in self.engines:
            engine.pause()

    def _commit(self, version: int) -> None:
        for engine in self.engines:
            engine.commit(version)

    def _compare_names(self) -> None:
        """One pass over the policy's tensors without sending: everything that differs, in one message."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.policy.hf_tensors(self._dtype)}
        for engine in self.engines:
            expected = engine.expected_tensors()
            faults = [f"the policy lacks {name!r}" for name in expected if name not in shapes]
            faults += [f"the engine lacks {name!r}" for name in shapes if name not in expected]
            faults += [
                f"{name!r} is {list(shapes[name])} in the policy, {list(spec.shape)} in the engine"
                for name, spec in expected.items()
                if name in shapes and shapes[name] != spec.shape
            ]
            if faults:
                more = f" … and {len(faults) - 8} more" if len(faults) > 8 else ""
                raise ValueError("; ".join(faults[:8]) + more)

    def _common_dtype(self) -> torch.dtype | None:
        """The dtype to gather in: that of all engines, or the policy's where they have several."""
        local = {spec.dtype for engine in self.engines for spec in engine.expected_tensors().values()}
        dtypes = set().union(*all_gather_objects(local, self._group))
        return dtypes.pop() if len(dtypes) == 1 else None

    def _with_digests(self, tensors: Iterator[tuple[str, Tensor]], digests: dict[str, str]) -> Iterator:
        for name, tensor in tensors:
            digests[name] = tensor_digest(tensor.to(self._dtype_of(name)))
            yield name, tensor

    def _dtype_of(self, name: str) -> torch.dtype:
        return self._specs[name].dtype

    def _together(self, what: str, action: Callable[[], T]) -> T:
        """Do it on every rank; where one rank fails, PublishError on all of them."""
        failure, message, result = None, None, None
        try:
            result = action()
        except Exception as error:
            failure, message = error, f"{type(error).__name__}: {error}"
        messages = all_gather_objects(message, self._group)
        if failed := [(rank, text) for rank, text in enumerate(messages) if text is not None]:
            rank, text = failed[0]
            raise PublishError(
                f"rank {rank} could not {what} of version {self.version + 1}: {text} (version {self.version} stays)"
            ) from failure
        return result


def _compare_digests(sent: dict[str, str], read: dict[str, str]) -> None:
    if differ := [name for name in sent if sent[name] != read.get(name)]:
        raise RuntimeError(f"{len(differ)} of {len(sent)} tensors differ after loading: {', '.join(differ[:5])}")
