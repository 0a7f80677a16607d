"""A policy gradient and self-distillation on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rlpost.algorithms.base import Algorithm
from rlpost.types import LossOutput

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.policy.logits import Head
    from rlpost.types import MicroBatch, Sample


@dataclass
class Blend(Algorithm):
    """reward_weight·GRPO + (1 − reward_weight)·SDPO, over one denominator.

    grpo, sdpo: the fields of either part; a `name` among them chooses another algorithm (`{name: dr_grpo}`,
    `{name: opd}`). The head runs once for each part.
    """

    name: ClassVar[str] = "blend"
    reward_weight: float = 0.5
    grpo: Mapping[str, Any] = field(default_factory=dict)
    sdpo: Mapping[str, Any] = field(default_factory=dict)
    parts: list[Algorithm] = field(init=False, repr=False, compare=False, default_factory=list)

    def problems(self) -> Iterator[str]:
        from rlpost.algorithms import build_algorithm

        yield from super().problems()
        yield from self.check_number("reward_weight", 0, 1)
        for name, given in (("grpo", self.grpo), ("sdpo", self.sdpo)):
            if "reduction" in given:
                yield f"algorithm.{name}.reduction is not allowed; both parts share algorithm.reduction"
            try:
                self.parts.append(build_algorithm({"name": name, **given, "reduction": self.reduction}))
                if "values" in self.parts[-1].needs:
                    yield f"algorithm.{name}.name={self.parts[-1].name} is not allowed in a blend, which has no critic"
            except ValueError as error:
                lines = (line.replace("algorithm", f"algorithm.{name}", 1) for line in str(error).splitlines())
                yield from (line for line in lines if ".reduction=" not in line)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(part.needs for part in self.parts))

    @property
    def group_relative(self) -> bool:
        return any(part.group_relative for part in self.parts)

    @property
    def top_k_needed(self) -> int:
        return max(part.top_k_needed for part in self.parts)

    @property
    def teacher_top_k(self) -> int:
        return max(part.teacher_top_k for part in self.parts)

    def beyond_lists(self) -> Iterator[str]:
        for name, part in zip(("grpo", "sdpo"), self.parts):
            yield from (setting.replace("algorithm", f"algorithm.{name}", 1) for setting in part.beyond_lists())

    @property
    def reference_every(self) -> int | None:
        return self.parts[0].reference_every

    def prepare(self, samples: Sequence[Sample]) -> dict[str, float]:
        return {name: value for part in self.parts for name, value in part.prepare(samples).items()}

    def finish(self, samples: Sequence[Sample], total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        return {name: value for part in self.parts for name, value in part.finish(samples, total).items()}

    def has_signal(self, samples: Sequence[Sample]) -> bool:
        return any(part.has_signal(samples) for part, weight in zip(self.parts, self._weights()) if weight)

    def loss(self, head: Head, micro: MicroBatch) -> LossOutput:
        outputs = [part.loss(head, micro) for part in self.parts]
        loss_N = sum(weight * output.loss_N for weight, output in zip(self._weights(), outputs))
        return LossOutput(loss_N, {name: value for output in outputs for name, value in output.metrics.items()})

    def _weights(self) -> tuple[float, float]:
        return self.reward_weight, 1 - self.reward_weight

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, its in zip(self.parts, state["parts"]):
            part.load_state_dict(its)
