"""What the trainer, the teacher and the publisher ask of the trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from rlpost.types import LossFn, MicroBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlpost.policy.logits import Head

StateKind = Literal["master", "exp_avg", "exp_avg_sq"]


class Policy(Protocol):
    def train_step(self, micros: Sequence[MicroBatch], loss: LossFn) -> dict[str, float]:
        """One optimizer step over all ranks' micro-batches (the same number on each rank).

        The gradient is that of Σ loss_N · fields["weights"] over all micro-batches and data-parallel ranks: the
        weights already hold the one denominator. Returns `train/loss`, `train/grad_norm`, `train/lr`,
        `train/skipped` (1 where the gradient was not finite and nothing moved), and the pooled metrics of the
        loss. Collective.
        """
        ...

    def score(
        self, micros: Sequence[MicroBatch], fn: Callable[[Head, MicroBatch], dict[str, Tensor]]
    ) -> list[dict[str, Tensor]]:
        """Forward only (eval mode, no gradient): fn's results per micro-batch. Collective."""
        ...

    def hf_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, whole tensors, one at a time. Collective: every rank
        iterates to the end and sees every tensor."""
        ...

    def masters(self) -> dict[str, Tensor]:
        """This rank's fp32 master shards by Megatron name, live: writing to them and calling
        `sync_from_masters` changes the model."""
        ...

    def sync_from_masters(self) -> None: ...

    def head_weight(self) -> Tensor | None:
        """The live output head [V / TP, H] on the last pipeline stage, None on the others."""
        ...
