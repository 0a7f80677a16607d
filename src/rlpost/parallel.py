"""Ranks and groups: thin words over torch.distributed and Megatron's process groups."""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from rlpost.config.schema import ParallelConfig

T = TypeVar("T")


def device() -> torch.device:
    """The device of this rank: its own CUDA device, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


# Of every process group. Only a backstop: the watch-dog's limits of phases (watch.py) are shorter.
_timeout = timedelta(minutes=30)


def init_distributed(timeout_s: float | None = None) -> None:
    """Join the process group that torchrun announces, or make one of a single process (notebooks, tests).

    NCCL with CUDA, gloo without. Does nothing when a group exists already. timeout_s: of collectives, in all groups
    made from now on.
    """
    global _timeout
    if timeout_s is not None:
        _timeout = timedelta(seconds=timeout_s)
    if dist.is_initialized():
        return
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(device())
        if "OMP_NUM_THREADS" not in os.environ:
            # As torchrun does: with a thread for each of 32 cores a small operation took 7 ms instead of .1.
            torch.set_num_threads(1)
    where: dict[str, Any] = {}
    if "RANK" not in os.environ:
        # A store in memory needs no free port, so that many single processes can start at once.
        where = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", timeout=_timeout, **where)
    atexit.register(_leave)  # NCCL warns of groups that were left standing


def gloo_group() -> ProcessGroup:
    """A group of all ranks that shares nothing with another: for agreement while other groups may hang. Collective."""
    return dist.new_group(backend="gloo", timeout=_timeout)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def check_layout(parallel: ParallelConfig, ranks: int) -> int:
    """The data-parallel size of `ranks` ranks, or a ValueError that does the arithmetic."""
    sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context}
    optional = {"virtual_pipeline": parallel.virtual_pipeline, "expert_tensor": parallel.expert_tensor}
    for name, size in {**sizes, "expert": parallel.expert, **optional}.items():
        if size is not None and size < 1:
            raise ValueError(f"parallel.{name}={size}: must be at least 1")
    if parallel.sequence and parallel.tensor == 1:
        raise ValueError("parallel.sequence=true needs parallel.tensor > 1: it cuts sequences over the tensor ranks")
    if virtual_stages(parallel) and parallel.pipeline == 1:
        raise ValueError(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline} needs parallel.pipeline > 1: it cuts its stages"
        )
    model_ranks = math.prod(sizes.values())
    if ranks % model_ranks:
        raise ValueError(f"{ranks} ranks are not a multiple of {_product(sizes)}; start a multiple of it")
    experts = {"expert": parallel.expert, "expert_tensor": expert_tensor(parallel), "pipeline": parallel.pipeline}
    if ranks % math.prod(experts.values()):
        layout = {**sizes, "data": ranks // model_ranks}
        raise ValueError(
            f"ranks {_product(layout)} are no multiple of {_product(experts)}, which the experts need: "
            "change parallel.expert or parallel.expert_tensor"
        )
    return ranks // model_ranks


def _product(sizes: Mapping[str, int]) -> str:
    return f"{math.prod(sizes.values())} = " + " × ".join(f"{name} {size}" for name, size in sizes.items())


def virtual_stages(parallel: ParallelConfig) -> int | None:
    """Model chunks on each pipeline rank, None where every rank has one."""
    return parallel.virtual_pipeline if (parallel.virtual_pipeline or 1) > 1 else None


def layers_of_stages(layers: int, stages: int) -> list[int]:
    """How many decoder layers each pipeline stage has: the same or, where the stages do not divide them, as even as can
    be with fewer at the two ends, which have the embedding and the head.

    Raises ValueError where there are fewer layers than stages.
    """
    if layers < stages:
        raise ValueError(f"parallel.pipeline={stages} is more than the {layers} layers")
    if layers % stages == 0:
        return [layers // stages] * stages
    middle, between = -(-layers // stages), stages - 2
    if layers - between * middle < 2:
        middle -= 1
    ends = layers - between * middle
    return [-(-ends // 2), *[middle] * between, ends // 2]


def expert_tensor(parallel: ParallelConfig) -> int:
    """Ranks that share one expert: where nothing else is said every expert is whole, as small ones should be."""
    return parallel.expert_tensor or 1


@dataclass(frozen=True)
class Axis:
    """One dimension of the layout: the ranks that differ from this one in it alone."""

    group: ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: ProcessGroup) -> Axis:
        return cls(group, group.rank(), group.size())

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands. Tensor-parallel ranks are neighbours, then context, data and pipeline ranks.

    Samples are dealt out over `dp`. Weights and optimizer state are shared out over `shard`: the data-parallel and
    the context-parallel ranks together, as each of them sees tokens of its own. Experts lie differently on the same
    ranks: `expert` ranks have different experts, `expert_tp` ranks cut each, `expert_shard` ranks have the same.
    """

    rank: int
    world_size: int
    dp: Axis
    tp: Axis
    pp: Axis
    cp: Axis
    shard: Axis
    expert: Axis
    expert_tp: Axis
    expert_shard: Axis

    @classmethod
    def build(cls, parallel: ParallelConfig) -> Mesh:
        """Megatron's process groups for `parallel` over all ranks. Collective; the groups of an earlier mesh of
        the same shape are used again, those of another shape are given up.

        Raises ValueError where the ranks do not fit.
        """
        from megatron.core import parallel_state as state

        init_distributed()
        check_layout(parallel, dist.get_world_size())
        shape = (
            parallel.tensor,
            parallel.pipeline,
            virtual_stages(parallel),
            parallel.context,
            parallel.expert,
            expert_tensor(parallel),
        )
        if state.model_parallel_is_initialized() and shape != _current_shape():
            state.destroy_model_parallel()
        if not state.model_parallel_is_initialized():
            state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tensor,
                pipeline_model_parallel_size=parallel.pipeline,
                virtual_pipeline_model_parallel_size=virtual_stages(parallel),
                context_parallel_size=parallel.context,
                expert_model_parallel_size=parallel.expert,
                expert_tensor_parallel_size=expert_tensor(parallel),
                distributed_timeout_minutes=math.ceil(_timeout.total_seconds() / 60),
            )
        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            dp=Axis.of(state.get_data_parallel_group()),
            tp=Axis.of(state.get_tensor_model_parallel_group()),
            pp=Axis.of(state.get_pipeline_model_parallel_group()),
            cp=Axis.of(state.get_context_parallel_group()),
            shard=Axis.of(state.get_data_parallel_group(with_context_parallel=True)),
            expert=Axis.of(state.get_expert_model_parallel_group()),
            expert_tp=Axis.of(state.get_expert_tensor_parallel_group()),
            expert_shard=Axis.of(state.get_expert_data_parallel_group()),
        )

    @property
    def last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1


def _current_shape() -> tuple[int | None, ...]:
    from megatron.core import parallel_state as state

    return (
        state.get_tensor_model_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_virtual_pipeline_model_parallel_world_size(),
        state.get_context_parallel_world_size(),
        state.get_expert_model_parallel_world_size(),
        state.get_expert_tensor_parallel_world_size(),
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


def broadcast_tensors(
    rows: Sequence[Mapping[str, Tensor]], source: int, group: ProcessGroup, on: torch.device
) -> list[dict[str, Tensor]]:
    """The named tensors of global rank `source`, on every rank of the group; what other ranks give is not read."""
    mine = dist.get_rank() == source
    shapes = [{name: (t.shape, t.dtype) for name, t in row.items()} for row in rows] if mine else None
    shapes = broadcast_object(shapes, source, group)
    if mine:
        result = [{name: t.contiguous() for name, t in row.items()} for row in rows]
    else:
        result = [{n: torch.empty(shape, dtype=d, device=on) for n, (shape, d) in row.items()} for row in shapes]
    for row in result:
        for tensor in row.values():
            dist.broadcast(tensor, src=source, group=group)
    return result


def sum_over_ranks(values: Mapping[str, float], group: ProcessGroup | None = None) -> dict[str, float]:
    """Scalars summed in float64 over the ranks; a name that some ranks lack counts as 0 there."""
    totals: dict[str, float] = {}
    for one in all_gather_objects(dict(values), group):
        for name, value in one.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals
