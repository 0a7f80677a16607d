"""Gradients reduced while the backward runs, weights gathered while the next forward does.

Megatron's data-parallel wrapper starts the reduction of a bucket once the last micro-batch has added to all of its
gradients, and gathers a bucket of new weights when a layer first needs it. Three things are ours to see to: that it
knows which micro-batch is the last, that every micro-batch gives every parameter a gradient (`untouched`), and that
whoever reads weights outside of a layer's forward waits for them (`finish_gathers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


def reduce_at_the_last_micro_batch(chunks: list[DistributedDataParallel]) -> None:
    """To be called once; the schedules of all steps read it from the configuration that the chunks share."""
    found = [chunk.no_sync for chunk in chunks]
    chunks[0].config.no_sync_func = found if len(found) > 1 else found[0]


def finish_gathers(chunks: list[DistributedDataParallel]) -> None:
    """Until all weights are those of the last step. Where they are, or nothing overlaps, it does nothing. Collective
    over the data-parallel ranks."""
    for chunk in chunks:
        for parameter in chunk.module.parameters():
            finish_gather(chunk, parameter)


def finish_gather(chunk: DistributedDataParallel, parameter: Tensor) -> None:
    """The same for one weight of the chunk."""
    if chunk.ddp_config.overlap_param_gather:
        chunk.param_to_bucket_group[parameter].finish_param_sync(skip_next_bucket_dispatch=True)


def untouched(weights: list[Tensor]) -> Tensor:
    """Zero, with a gradient of zeros for each of the weights."""
    return sum(weight.flatten()[:0].sum() for weight in weights)
