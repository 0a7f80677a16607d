"""The things that travel between rooms: Prompt, Sample, MicroBatch, and what engines exchange.

Shape suffixes: T tokens of a packed micro-batch, N response tokens of it, B sequences, H hidden size,
V vocabulary, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlpost.policy.logits import Head

Message = dict[str, str]
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass
class Prompt:
    """One row of a data set, rendered once through the chat template."""

    id: int  # row number in its data set
    messages: list[Message]  # raw chat messages, the system message included
    ids: list[int]  # token ids with the generation prompt, exactly one BOS
    answer: Any = None
    source: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)  # every other column


@dataclass
class Sample:
    """One response to one prompt, from its birth in the rollout to the loss."""

    prompt: Prompt
    group_id: int  # the same for all samples of one prompt in one step, unique in the run
    index: int  # number within the group, 0 … n−1
    response_ids: list[int] = field(default_factory=list)
    response: str = ""  # decoded, special tokens removed
    rollout_logprobs: list[float] = field(default_factory=list)  # per response token, at the rollout temperature
    loss_mask: list[int] = field(default_factory=list)  # per response token: 1 = sampled by the model
    finish_reason: FinishReason = "stop"
    version: int = 0  # of the weights that sampled it

    reward: float | None = None
    feedback: str | None = None
    format_ok: bool | None = None
    reward_details: dict[str, float] = field(default_factory=dict)

    teacher_messages: list[Message] | None = None
    teacher_prompt_ids: list[int] | None = None
    distill_mask: float = 0.0  # 0 = the teacher has nothing to say here
    teacher_info: dict[str, Any] = field(default_factory=dict)  # how the teacher prompt was routed

    tokens: dict[str, Tensor] = field(default_factory=dict)  # per response token: advantages, old_logprobs, weights, …

    @property
    def ids(self) -> list[int]:
        return self.prompt.ids + self.response_ids


@dataclass
class MicroBatch:
    """Whole sequences packed one after the other, at most `max_tokens_per_micro_batch` tokens."""

    input_ids_T: Tensor  # int64
    position_ids_T: Tensor  # int64, from 0 in every sequence
    cu_seqlens: Tensor  # int32 [B+1]
    max_seqlen: int
    predict_N: Tensor  # int64: the position in T whose logits predict response token n (one before the token itself)
    target_N: Tensor  # int64: the response tokens
    sequence_N: Tensor  # int64: the sequence (0 … B−1) that response token n belongs to
    samples: list[Sample]  # B of them, in pack order; empty for a filler micro-batch
    fields: dict[str, Tensor] = field(default_factory=dict)  # [N, …], the samples' `tokens` one after the other
    teacher_head: Tensor | None = None  # the teacher's local vocabulary shard [V / TP, H] beside `teacher_hidden`

    def to(self, device: torch.device | str) -> MicroBatch:
        kept = ("max_seqlen", "samples", "fields", "teacher_head")
        moved = {k: to_device(v, device) for k, v in vars(self).items() if k not in kept}
        return MicroBatch(
            **moved,
            max_seqlen=self.max_seqlen,
            samples=self.samples,
            fields={k: to_device(v, device) for k, v in self.fields.items()},
            teacher_head=None if self.teacher_head is None else self.teacher_head.to(device),
        )


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor there. What goes to a GPU goes by page-locked memory, so that nobody waits for its earlier work."""
    if str(device).startswith("cuda") and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass
class LossOutput:
    """What an algorithm's loss returns for one micro-batch."""

    loss_N: Tensor  # per response token; the policy sums loss_N · fields["weights"]
    metrics: dict[str, Tensor] = field(default_factory=dict)  # detached [N]; pooled over live tokens as a mean,
    # or as a maximum where the name ends in "/max"


LossFn = Callable[["Head", MicroBatch], LossOutput]


def groups(samples: Sequence[Sample]) -> list[list[Sample]]:
    """By group_id, never by position; each in the order of sample index."""
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.group_id, []).append(sample)
    return [sorted(group, key=lambda sample: sample.index) for group in found.values()]
