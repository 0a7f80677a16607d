"""PPO's critic: the policy's kind of model with a value head, its own weights and its own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlpost.policy.megatron import MegatronPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.config.schema import CriticConfig, ModelConfig, ParallelConfig
    from rlpost.policy.value_head import ValueHead
    from rlpost.types import LossOutput, MicroBatch

ValueLoss = Callable[["Tensor", "MicroBatch"], "LossOutput"]


class Critic:
    """V(state before each response token). Cut over the ranks as the policy is.

    Args:
        config: `path` (default: the policy's weights) and the optimizer.
        model: the policy's; dtype and layers are the same.
        parallel, total_steps, seed, recompute, overlap: as of `MegatronPolicy`.

    Attributes:
        model: the weights and the optimizer's state, for checkpoints.
    """

    def __init__(
        self,
        config: CriticConfig,
        model: ModelConfig,
        parallel: ParallelConfig,
        *,
        total_steps: int | None = None,
        seed: int = 0,
        recompute: str = "none",
        overlap: bool = False,
    ) -> None:
        self.model = MegatronPolicy(
            replace(model, path=config.path or model.path, router_aux_loss=0.0),
            config,
            parallel,
            total_steps=total_steps,
            seed=seed,
            recompute=recompute,
            overlap=overlap,
            value_head=True,
        )

    def score(self, micros: Sequence[MicroBatch]) -> list[dict[str, Tensor]]:
        """{"values": [N]} of each micro-batch, without a gradient. Collective."""
        return self.model.score(micros, _values)

    def train_step(self, micros: Sequence[MicroBatch], loss: ValueLoss) -> dict[str, float]:
        """One optimizer step on `loss(values_N, micro)`, as `Policy.train_step`; `critic/loss`, `critic/grad_norm`,
        `critic/lr`, `critic/skipped` and the pooled metrics of the loss. Collective."""

        def of_head(head: ValueHead, micro: MicroBatch) -> LossOutput:
            return loss(head.values(), micro)

        metrics = self.model.train_step(micros, of_head)
        return {name.replace("train/", "critic/"): value for name, value in metrics.items()}


def _values(head: ValueHead, micro: MicroBatch) -> dict[str, Tensor]:
    return {"values": head.values()}
