"""What every algorithm is: a dataclass of its Hydra keys, advantages of a step's samples, a loss on micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rlpost.imports import import_object
from rlpost.losses.reduce import REDUCTIONS

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.policy.logits import Head
    from rlpost.types import LossOutput, MicroBatch, Sample


@dataclass
class Algorithm:
    """Fields are the keys of the Hydra group `algorithm`; a wrong value is a ValueError, all of them at once.

    reduction: how the step's one denominator is counted (`losses/reduce.py`).
    """

    name: ClassVar[str]
    reference_every: ClassVar[int | None] = None  # steps after which the reference becomes the current policy
    reduction: str = "token_mean"

    def __post_init__(self) -> None:
        problems = list(self.problems())
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def needs(self) -> frozenset[str]:
        """Of {"rollout", "reward", "teacher", "teacher_distribution", "reference_logprobs", "old_logprobs",
        "old_logprobs_always", "values"}, what this configuration uses. Without "teacher_distribution" a teacher's
        log-probs of the sampled tokens are enough, which a server can give. "old_logprobs" are scored only where a
        rollout batch gets more than one optimizer step; in `finish` they are there with "old_logprobs_always" alone.
        "values" asks for a critic, which learns by `value_loss`; its values are there in `finish`."""
        return frozenset()

    @property
    def top_k_needed(self) -> int:
        """The vocabulary must have this many ids."""
        return 0

    @property
    def teacher_top_k(self) -> int:
        """The teacher's own likeliest ids, so many for each position, are all that this configuration uses of its
        distribution; 0: it uses none of it, or more (`beyond_lists`)."""
        return 0

    def beyond_lists(self) -> Iterator[str]:
        """Each setting for which the lists of `teacher_top_k` ids are not enough, as `algorithm.field=value`."""
        yield from ()

    @property
    def group_relative(self) -> bool:
        """Whether a group of one sample could teach nothing."""
        return False

    def prepare(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Sets per-token targets in `sample.tokens` from all samples of the step (every rank has them all), and
        returns the metrics that are known here."""
        return {}

    def finish(self, samples: Sequence[Sample], total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Sets what depends on scored log-probs, once they are in `sample.tokens`; returns metrics of the whole step.

        samples: those of this data-parallel rank alone. total: the sum of a tensor over data-parallel ranks, which all
        must call alike.
        """
        return {}

    def loss_masks(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Per sample, 1 for each response token that counts in the denominator and trains."""
        return [sample.loss_mask for sample in samples]

    def has_signal(self, samples: Sequence[Sample]) -> bool:
        """Whether a step on these samples (all ranks', after `prepare`) can have a gradient at all. Without one the
        step is left out: Adam would move on its momentum alone."""
        return any(any(mask) for mask in self.loss_masks(samples))

    def loss(self, head: Head, micro: MicroBatch) -> LossOutput:
        """The policy's, of one micro-batch; abstract, as every algorithm has its own."""
        raise NotImplementedError

    def value_loss(self, values_N: Tensor, micro: MicroBatch) -> LossOutput:
        """The critic's loss on its values of the states before each response token; only with "values" in `needs`."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the configuration."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""

    def problems(self) -> Iterator[str]:
        """One line for each field whose value is not allowed."""
        yield from self.check_choice("reduction", REDUCTIONS)

    def check_choice(self, field: str, allowed: Sequence[str | None]) -> Iterator[str]:
        value = getattr(self, field)
        if value not in allowed:
            names = ", ".join("null" if a is None else a for a in allowed)
            yield f"algorithm.{field}={value} is not allowed; allowed are {names}"

    def check_function(self, field: str, allowed: Sequence[str]) -> Iterator[str]:
        """A name, or a function of one's own: itself or its import path."""
        value = getattr(self, field)
        if callable(value) or value in allowed:
            return
        if not (isinstance(value, str) and "." in value):
            yield f"algorithm.{field}={value} is not allowed; allowed are {', '.join(allowed)}, or an import path"
            return
        try:
            import_object(value)
        except ImportError as error:
            yield f"algorithm.{field}={value} is not allowed; {error}"

    def check_number(
        self, field: str, least: float = 0.0, most: float = math.inf, *, above: bool = False, optional: bool = False
    ) -> Iterator[str]:
        """least ≤ value ≤ most, or least < value where `above`."""
        value = getattr(self, field)
        if value is None and optional:
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value <= most or (above and value == least):
            lower = f"a number {'above' if above else 'of at least'} {least:g}"
            upper = "" if most == math.inf else f" and at most {most:g}"
            yield f"algorithm.{field}={value} is not allowed; it is {lower}{upper}{', or null' if optional else ''}"

    def check_flag(self, field: str) -> Iterator[str]:
        if not isinstance(getattr(self, field), bool):
            yield f"algorithm.{field}={getattr(self, field)} is not allowed; it is true or false"


def own_function(value: str | Callable[..., Any]) -> Callable[..., Any] | None:
    """The function that a field checked by `check_function` means, or None for a built-in name."""
    if callable(value):
        return value
    return import_object(value) if "." in value else None


def live_field(micro: MicroBatch, name: str) -> Tensor:
    """A per-token field [N] with 0 in the masked slots, whatever they held."""
    return micro.fields[name].masked_fill(micro.fields["loss_mask"] <= 0, 0.0)
