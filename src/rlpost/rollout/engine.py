"""The engine protocol: what the sampler, the publisher and an engine-backed teacher ask of an inference engine.

`engines/torch.py` is the embedded one and the oracle of the tests; an SGLang engine answers the same calls.

Life of the weights: `pause` → `load_bucket` for every tensor → `flush` → `commit`. Between `pause` and `commit`, before
the first commit, and after waking weights that slept, an engine refuses to serve (EngineNotReady).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from rlpost.types import FinishReason

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Tag = Literal["weights", "kv_cache", "cuda_graph"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache", "cuda_graph")


class EngineNotReady(RuntimeError):
    """The engine was asked for something that it cannot do in its present state."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. Log-probs are always those of softmax(logits / temperature) over the whole vocabulary,
    before top-p and top-k cut it. temperature 0 is greedy (log-probs then at temperature 1). top-p and top-k are
    joint: a token stays if it is among the top_k and in the smallest set that holds top_p of the whole mass."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    stop_token_ids: tuple[int, ...] = ()  # the stop token is part of the response
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: above 0, at most 1")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: at least 1, or -1 for the whole vocabulary")


@dataclass(frozen=True)
class Request:
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int  # the same seed, prompt and weights give the same response, whatever else is in the batch


@dataclass
class Completion:
    ids: list[int]
    logprobs: list[float]  # one per id, at the sampling temperature
    finish_reason: FinishReason
    version: int  # of the weights that sampled it


@dataclass
class PromptScore:
    """Log-probs of ids[start:] given what stands before each; R = len(ids) − start."""

    logprobs: Tensor  # float32 [R]
    topk_ids: Tensor | None = None  # int64 [R, K], most likely first
    topk_logprobs: Tensor | None = None  # float32 [R, K], normalised over the whole vocabulary
    version: int = 0  # of the weights that scored it


@dataclass(frozen=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Bucket:
    """Named tensors in one flat buffer: what travels to an engine in one message."""

    buffer: Tensor  # uint8 [bytes]
    entries: list[tuple[str, TensorSpec, int]] = field(default_factory=list)  # name, shape and dtype, byte offset


class Engine(Protocol):
    """One rank-local inference engine. It serves only between `commit` and the next `pause`."""

    @property
    def version(self) -> int:
        """Of the weights that it last committed; 0 before the first commit."""
        ...

    @property
    def started(self) -> bool: ...

    @property
    def serving(self) -> bool:
        """Between `commit` and what gives the weights up: `pause`, or `sleep` of the weights."""
        ...

    def start(self) -> None:
        """Allocate the model. Everything else comes after."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in their order."""
        ...

    def score(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], *, top_k: int = 0, temperature: float = 1.0
    ) -> list[PromptScore]:
        """Log-probs of each sequence from its start on (start ≥ 1: nothing predicts the first token)."""
        ...

    def sleep(self, tags: Sequence[Tag]) -> None:
        """Give back the memory of these tags. The engine must be idle."""
        ...

    def wake(self, tags: Sequence[Tag]) -> None:
        """Take the memory back. Woken weights hold garbage until the next publish."""
        ...

    def expected_tensors(self) -> dict[str, TensorSpec]:
        """Hugging Face names, shapes and dtypes of every weight that a publish must bring (a tied head comes once)."""
        ...

    def pause(self) -> None:
        """Admit nothing more, drain what runs, and refuse to serve until `commit`: the weights are given up."""
        ...

    def load_bucket(self, bucket: Bucket) -> None:
        """Copy the bucket's tensors, at the latest before `flush` returns. Where a name, shape or dtype differs:
        ValueError, and nothing is written."""
        ...

    def flush(self) -> None:
        """Drop the prefix cache. Raises where an expected tensor has not arrived since `pause`: after `flush`,
        `commit` has no reason left to fail."""
        ...

    def commit(self, version: int) -> None:
        """Serve the loaded weights under this version."""
        ...

    def digest(self) -> dict[str, str]:
        """`tensor_digest` of every weight, read back from the engine."""
        ...

    def abort(self) -> None:
        """End the running `generate` (from another thread): it returns the tokens so far, finish reason `abort`."""
        ...

    def close(self) -> None: ...
