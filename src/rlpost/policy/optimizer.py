"""The optimizer's state as whole tensors under Hugging Face names, whatever the cut.

Megatron's distributed optimizer keeps, on each data-parallel rank, a contiguous range of every parameter of the
rank's stage and tensor-parallel shard: an fp32 master and Adam's two moments. `MasterShards` gathers such ranges to
whole Hugging Face tensors and cuts whole tensors into ranges, bit-exactly, so that what one layout wrote another reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rlpost.parallel import all_gather_objects, device
from rlpost.policy.hf_map import is_expert, shift_expert
from rlpost.policy.overlap import finish_gathers

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from rlpost.config.schema import OptimConfig
    from rlpost.parallel import Axis, Mesh
    from rlpost.policy.hf_map import HFMap
    from rlpost.policy.protocol import StateKind

GetTensor = Callable[[str], Tensor]


def learning_rate(config: OptimConfig, step: int, total_steps: int | None) -> float:
    """The rate of step `step` (from 0): a linear warmup, then constant, or falling to `min_lr` at `total_steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if total_steps is None:
        raise ValueError(f"optim.schedule={config.schedule!r} needs the number of steps: only 'constant' does without")
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    if config.schedule == "linear":
        remaining = 1.0 - progress
    elif config.schedule == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        raise ValueError(f"optim.schedule={config.schedule!r}: allowed are constant, linear, cosine")
    return config.min_lr + (config.lr - config.min_lr) * remaining


@dataclass(frozen=True)
class _Parameter:
    """One parameter of this tensor-parallel rank and how the data-parallel ranks share it."""

    name: str
    parameter: Tensor
    start: int  # of the parameter within its bucket, which is cut evenly over the ranks of `axis`
    bucket_shard: int  # elements of the bucket on each of these ranks
    axis: Axis

    def range_of(self, rank: int) -> tuple[int, int]:
        """The elements of the flat parameter that a rank owns; empty where begin equals end."""
        begin = rank * self.bucket_shard - self.start
        size = self.parameter.numel()
        return min(max(begin, 0), size), min(max(begin + self.bucket_shard, 0), size)


class MasterShards:
    """This rank's fp32 master shards and the moments beside them, by the names of the whole Megatron model.

    Args:
        chunks: the wrapped chunks of the model whose parameters `optimizer` trains.
        hf_map: the names on disk.
    """

    def __init__(
        self, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, hf_map: HFMap, mesh: Mesh
    ) -> None:
        self._chunks, self._optimizer, self._map, self._mesh = chunks, optimizer, hf_map, mesh
        names = {parameter: name for chunk in chunks for name, parameter in chunk.module.global_parameters()}
        found: dict[str, _Parameter] = {}
        for chunk in chunks:
            buffers = [(buffer, mesh.shard) for buffer in chunk.buffers]
            buffers += [(buffer, mesh.expert_shard) for buffer in chunk.expert_parallel_buffers]
            for buffer, axis in buffers:
                for bucket in buffer.buckets:
                    shard = bucket.grad_data.numel() // axis.size
                    for parameter in bucket.params_list:
                        start = buffer.param_index_map[parameter][0] - bucket.offset
                        found[names[parameter]] = _Parameter(names[parameter], parameter, start, shard, axis)
        self._parameters = {name: found[name] for name in names.values()}  # the model's order
        self._owned = dict(self._find_masters(names))
        self._experts_here = chunks[0].config.num_moe_experts // mesh.expert.size if mesh.expert.size > 1 else 0
        shapes = {name: tuple(parameter.parameter.shape) for name, parameter in self._parameters.items()}
        self._stages = all_gather_objects(shapes, mesh.pp.group)

    def _find_masters(self, names: dict[Tensor, str]) -> Iterator[tuple[str, tuple[DistributedOptimizer, Tensor]]]:
        for optimizer in self._optimizer.chained_optimizers:
            for models, masters in (
                (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
                (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            ):
                for group, shards in zip(models, masters):
                    yield from ((names[p], (optimizer, shard)) for p, shard in zip(group, shards))

    def names(self) -> list[str]:
        """Of the parameters of all stages and experts."""
        return [other for shapes in self._stages for name in shapes for other in self._of_all_experts(name)]

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole model's tensors, by Hugging Face name."""
        found: dict[str, tuple[int, ...]] = {}
        for shapes in self._stages:
            for name, shape in shapes.items():
                for other in self._of_all_experts(name):
                    cut = 1 if self._map.rule(other)[0].cut is None else self._cut_over(other).size
                    whole = self._map.to_hf(other, [torch.empty(shape, device="meta")] * cut)
                    found |= {part: tuple(tensor.shape) for part, tensor in whole}
        return found

    def _of_all_experts(self, name: str) -> list[str]:
        """A parameter of a local expert: that of the same local expert on each expert-parallel rank. Else its name."""
        axis = self._mesh.expert
        if not is_expert(name):
            return [name]
        return [shift_expert(name, (rank - axis.rank) * self._experts_here) for rank in range(axis.size)]

    def masters(self) -> dict[str, Tensor]:
        """Live flat fp32 shards; of fp32 models they are views of the parameters themselves."""
        return {name: shard.detach() for name, (_, shard) in self._owned.items()}

    def state_tensors(self) -> Iterator[Tensor]:
        """What the optimizer alone holds: masters apart from the weights, and moments as soon as there are any."""
        for name, (optimizer, shard) in self._owned.items():
            if self._parameters[name].parameter.dtype is not torch.float32:
                yield shard
            yield from (value for value in optimizer.optimizer.state.get(shard, {}).values() if value.dim() > 0)

    def distinct(self) -> set[str]:
        """The masters that this rank counts where all ranks' are added up, so that each weight counts once."""
        return {
            name
            for name in self._owned
            if self._map.on_disk(name) and (self._mesh.tp.rank == 0 or self._map.rule(name)[0].cut is not None)
        }

    def sync(self) -> None:
        """Masters → model parameters, on all ranks. Collective."""
        finish_gathers(self._chunks)  # one under way would not see the masters, and forestall that which does
        with torch.no_grad():
            for optimizer in self._optimizer.chained_optimizers:
                optimizer._copy_main_params_to_model_params()
        for chunk in self._chunks:
            chunk.start_param_sync(force_sync=True)

    def moments(self, kind: StateKind) -> dict[str, Tensor]:
        """Live `exp_avg` or `exp_avg_sq` shards. They are zero before the first step."""
        return {name: self._adam_state(name)[kind] for name in self._owned}

    def _adam_state(self, name: str) -> dict[str, Tensor]:
        optimizer, shard = self._owned[name]
        state = optimizer.optimizer.state[shard]
        if not state:
            state["exp_avg"] = torch.zeros_like(shard, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(shard, requires_grad=False)
            if isinstance(optimizer.optimizer, torch.optim.Adam):
                state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
        return state

    def set_step(self, step: int) -> None:
        """The number of updates that the moments have seen (Adam's bias correction).

        Each parameter gets a counter of its own: Megatron's loading shares one tensor between all of them, which
        then counts once per parameter and step.
        """
        for name in self._owned:
            state = self._adam_state(name)
            if "step" in state:
                state["step"] = torch.full_like(state["step"], float(step))
            else:  # Transformer Engine's Adam counts once per group
                for group in self._owned[name][0].param_groups:
                    group["step"] = step

    def gather(self, shards: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole fp32 tensors under their Hugging Face names from shards like those of `masters()`, one parameter at
        a time. Collective: every rank iterates to the end and sees every tensor."""
        return self._whole(lambda name: self._over_data_parallel(self._parameters[name], shards), torch.float32)

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The same of the model's parameters."""
        finish_gathers(self._chunks)
        return self._whole(lambda name: self._parameters[name].parameter.detach().to(dtype), dtype)

    def _whole(self, local: Callable[[str], Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Stage after stage: `local` gives this tensor-parallel rank's part of a parameter of its own stage."""
        pp = self._mesh.pp
        for stage, shapes in enumerate(self._stages):
            for name, shape in shapes.items():
                if not self._map.on_disk(name):
                    continue
                if stage == pp.rank:
                    part = local(name).contiguous()
                else:
                    part = torch.empty(shape, dtype=dtype, device=device())
                if pp.size > 1:
                    dist.broadcast(part, src=pp.global_rank(stage), group=pp.group)
                others = self._of_all_experts(name)
                for other, piece in zip(others, _gathered(part, self._mesh.expert) if len(others) > 1 else [part]):
                    yield from self._map.to_hf(other, self._over_tensor_parallel(other, piece))

    def _over_data_parallel(self, parameter: _Parameter, shards: dict[str, Tensor]) -> Tensor:
        shape, axis = parameter.parameter.shape, parameter.axis
        if axis.size == 1:
            return shards[parameter.name].to(device()).view(shape)  # a snapshot's lie in host memory
        flat = torch.empty(shape.numel(), dtype=torch.float32, device=parameter.parameter.device)
        for rank in range(axis.size):
            begin, end = parameter.range_of(rank)
            if begin == end:
                continue
            if rank == axis.rank:
                flat[begin:end] = shards[parameter.name]
            dist.broadcast(flat[begin:end], src=axis.global_rank(rank), group=axis.group)
        return flat.view(shape)

    def _over_tensor_parallel(self, name: str, local: Tensor) -> list[Tensor]:
        """The shards of all tensor-parallel ranks in rank order; only the own one where nothing is cut."""
        return [local] if self._map.rule(name)[0].cut is None else _gathered(local, self._cut_over(name))

    def _cut_over(self, name: str) -> Axis:
        return self._mesh.expert_tp if is_expert(name) else self._mesh.tp

    def scatter(self, get: GetTensor) -> dict[str, Tensor]:
        """The inverse of `gather`: this rank's shards, new fp32 tensors, of the whole tensors that `get` returns by
        Hugging Face name. Not collective; of memory-mapped tensors only what the rank needs is read."""
        found = {}
        for name in self._owned:
            piece, device = self._piece(name, get), self._parameters[name].parameter.device
            found[name] = torch.empty(piece.shape, dtype=torch.float32, device=device).copy_(piece)
        return found

    def _piece(self, name: str, get: GetTensor) -> Tensor:
        """The range of a parameter that this rank owns; maybe a view of what `get` returned."""
        parameter = self._parameters[name]
        axis = self._cut_over(name)
        local = self._map.from_hf(name, get, axis.rank, axis.size)
        if local.shape != parameter.parameter.shape:
            raise ValueError(
                f"{name}: the tensors given make {tuple(local.shape)}, "
                f"the model's parameter is {tuple(parameter.parameter.shape)}"
            )
        begin, end = parameter.range_of(parameter.axis.rank)
        return local.reshape(-1)[begin:end]

    def load(self, kind: StateKind, get: GetTensor) -> None:
        """Overwrites masters or moments with whole tensors by Hugging Face name. Masters reach the model at the next
        `sync`. Raises ValueError where a shape differs, before that parameter is touched."""
        live = self.masters() if kind == "master" else self.moments(kind)
        for name, shard in live.items():
            shard.copy_(self._piece(name, get))


def _gathered(local: Tensor, axis: Axis) -> list[Tensor]:
    if axis.size == 1:
        return [local]
    everyone = [torch.empty_like(local) for _ in range(axis.size)]
    dist.all_gather(everyone, local, group=axis.group)
    return everyone
