"""The engine protocol: what the sampler, the publisher and an engine-backed teacher ask of an inference engine.

`engines/torch.py` is the embedded one and the oracle of the tests; an SGLang engine answers the same calls.
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


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. Log-probs are always those of softmax(logits / temperature) over the whole vocabulary,
    before top-p and top-k cut it. temperature 0 is greedy (log-probs then at temperature 1)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    stop_token_ids: tuple[int, ...] = ()  # the stop token is part of the response
    ignore_eos: bool = False


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

    version: int  # of the weights it serves; 0 before the first commit

    def start(self) -> None: ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...

    def score(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], *, top_k: int = 0, temperature: float = 1.0
    ) -> list[PromptScore]: ...

    def sleep(self, tags: Sequence[Tag]) -> None: ...

    def wake(self, tags: Sequence[Tag]) -> None: ...

    def expected_tensors(self) -> dict[str, TensorSpec]:
        """Hugging Face names, shapes and dtypes of every weight that a publish must bring."""
        ...

    def pause(self) -> None:
        """Admit nothing more, drain what runs, and refuse to serve until `commit`."""
        ...

    def load_bucket(self, bucket: Bucket) -> None: ...

    def commit(self, version: int) -> None:
        """Flush the prefix cache and serve the loaded weights under this version."""
        ...

    def digest(self) -> dict[str, str]:
        """A digest per weight tensor, read back from the engine."""
        ...

    def abort(self) -> None: ...

    def close(self) -> None: ...
