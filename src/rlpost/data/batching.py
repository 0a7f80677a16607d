"""From a step's samples to each rank's micro-batches: update sets, weights, balanced assignment, packing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, get_args

import torch

from rlpost.data.packing import Use, assign, micro_batch_count, pack, run_tokens, unpack
from rlpost.losses.reduce import token_weights
from rlpost.types import MicroBatch, Sample, groups

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.algorithms.base import Algorithm


@dataclass
class Update:
    """One optimizer step's samples on this data-parallel rank."""

    samples: list[Sample]
    micro_batches: int  # on every rank
    teacher_micro_batches: int
    has_signal: bool  # of all ranks' samples: without it there is nothing to learn here


class Batcher:
    """The same samples give the same updates on every rank; dp_rank only picks this rank's part."""

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        updates_per_rollout: int,
        max_tokens: int,
        max_response_tokens: int,
        dp_rank: int,
        dp_size: int,
    ):
        self.algorithm, self.updates_per_rollout, self.max_tokens = algorithm, updates_per_rollout, max_tokens
        self.max_response_tokens, self.dp_rank, self.dp_size = max_response_tokens, dp_rank, dp_size

    def updates(self, samples: Sequence[Sample]) -> list[Update]:
        """Cut everybody's samples into optimizer steps by whole groups, and give each token its weight mask / D."""
        whole = groups(samples)
        if not whole:
            return []
        count = min(self.updates_per_rollout, len(whole))
        cuts = [round(i * len(whole) / count) for i in range(count + 1)]
        return [self._update([s for group in whole[a:b] for s in group]) for a, b in pairwise(cuts)]

    def _update(self, samples: list[Sample]) -> Update:
        masks = self.algorithm.loss_masks(samples)
        weights = token_weights(masks, self.algorithm.reduction, self.max_response_tokens)
        for sample, mask, weight in zip(samples, masks, weights):
            sample.tokens["weights"] = weight
            sample.tokens["loss_mask"] = torch.as_tensor(mask, dtype=torch.float32)
        parts = self._parts(samples)
        count, teacher_count = (
            max(micro_batch_count(part, self.max_tokens, use) for part in parts) for use in get_args(Use)
        )
        return Update(parts[self.dp_rank], count, teacher_count, self.algorithm.has_signal(samples))

    def _parts(self, samples: list[Sample]) -> list[list[Sample]]:
        """Each data-parallel rank's samples: whole groups, which run their prompt once, or one by one, which balances
        better; whichever leaves the busiest rank less to run."""
        candidates = []
        for units in (groups(samples), [[sample] for sample in samples]):
            parts = assign([run_tokens(unit) for unit in units], self.dp_size)
            candidates.append([[sample for i in part for sample in units[i]] for part in parts])
        return min(candidates, key=lambda parts: max(map(run_tokens, parts)))

    def pack(
        self, update: Update, use: Use = "student", defaults: Mapping[str, Tensor] | None = None
    ) -> list[MicroBatch]:
        """This rank's micro-batches of an update. defaults: what stands in a field that a sample lacks (`pack`)."""
        count = update.micro_batches if use == "student" else update.teacher_micro_batches
        return pack(update.samples, self.max_tokens, count=count, use=use, defaults=defaults)


def write_back(micros: Sequence[MicroBatch], results: Sequence[Mapping[str, Tensor]]) -> None:
    """Scored rows [N, …] of micro-batches into their samples' `tokens`."""
    for micro, result in zip(micros, results):
        for name, rows in result.items():
            for sample, row in zip(micro.samples, unpack(micro, rows)):
                sample.tokens[name] = row
