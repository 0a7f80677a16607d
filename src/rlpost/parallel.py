"""Ranks and groups: thin words over torch.distributed and Megatron's process groups."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rlpost.config.schema import ParallelConfig

T = TypeVar("T")


def device() -> torch.device:
    """The device of this rank: its own CUDA device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def init_distributed(timeout_s: float = 1800.0) -> None:
    """Join the process group that torchrun announces, or make one of a single process (notebooks, tests).

    NCCL with CUDA, gloo without. Does nothing when a group exists already.
    """
    if dist.is_initialized():
        return
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(device())
    where: dict[str, Any] = {}
    if "RANK" not in os.environ:
        # A store in memory needs no free port, so that many single processes can start at once.
        where = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", timeout=timedelta(seconds=timeout_s), **where)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def check_layout(parallel: ParallelConfig, ranks: int) -> int:
    """The data-parallel size of `ranks` ranks, or a ValueError that does the arithmetic."""
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context}
    for name, size in {**sizes, "expert": parallel.expert}.items():
        if size < 1:
            raise ValueError(f"parallel.{name}={size}: must be at least 1")
    not_yet = {
        "pipeline": parallel.pipeline,
        "virtual_pipeline": parallel.virtual_pipeline or 1,
        "context": parallel.context,
        "expert": parallel.expert,
        "expert_tensor": parallel.expert_tensor or 1,
    }
    for name, size in not_yet.items():
        if size != 1:
            raise ValueError(f"parallel.{name}={size} is not supported yet: only 1 is; use parallel.tensor")
    if parallel.sequence and parallel.tensor == 1:
        raise ValueError("parallel.sequence=true needs parallel.tensor > 1: it cuts sequences over the tensor ranks")
    model_ranks = math.prod(sizes.values())
    if ranks % model_ranks:
        product = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"{ranks} ranks are not a multiple of {model_ranks} = {product}; start a multiple of it")
    return ranks // model_ranks


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands. Tensor-parallel ranks are neighbours: rank = dp_rank · tp_size + tp_rank."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    dp_group: ProcessGroup
    tp_group: ProcessGroup

    @classmethod
    def build(cls, parallel: ParallelConfig) -> Mesh:
        """Megatron's process groups for `parallel` over all ranks. Collective; the groups of an earlier mesh of
        the same shape are used again, those of another shape are given up.

        Raises ValueError where the ranks do not fit, or where a dimension is not supported.
        """
        from megatron.core import parallel_state

        init_distributed()
        check_layout(parallel, dist.get_world_size())
        if parallel_state.model_parallel_is_initialized() and (
            parallel_state.get_tensor_model_parallel_world_size() != parallel.tensor
        ):
            parallel_state.destroy_model_parallel()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=parallel.tensor)
        dp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        tp_group = parallel_state.get_tensor_model_parallel_group()
        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            dp_rank=dp_group.rank(),
            dp_size=dp_group.size(),
            tp_rank=tp_group.rank(),
            tp_size=tp_group.size(),
            dp_group=dp_group,
            tp_group=tp_group,
        )


def all_gather_objects(value: T, group: ProcessGroup | None = None) -> list[T]:
    """Every rank's picklable value, in rank order."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: T, source: int = 0, group: ProcessGroup | None = None) -> T:
    """The value of global rank `source`, on every rank of the group."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


def sum_over_ranks(values: Mapping[str, float], group: ProcessGroup | None = None) -> dict[str, float]:
    """Scalars summed in float64 over the ranks; a name that some ranks lack counts as 0 there."""
    totals: dict[str, float] = {}
    for one in all_gather_objects(dict(values), group):
        for name, value in one.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals
