"""What rlpost runs inside SGLang's scheduler processes, through its `custom_weight_loader` argument.

A request is JSON: {"command", "reply": path, …}, and comes as the name of a tensor: the buffer of a bucket for `load`,
otherwise empty. Rank r writes its answer to `<reply>.<r>`; an exception is an answer too, because one that left this
function would end the engine.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlpost.rollout.engine import Bucket, TensorSpec
from rlpost.rollout.engines.sglang_load import BucketLoader
from rlpost.weights.buckets import tensor_digest

# Hugging Face module -> SGLang's fused module, and all parts of that in order.
FUSED = {
    part: (fused, parts)
    for fused, parts in {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.items()
    for part in parts
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def run(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """The entry point that SGLang calls with the one pair of request and tensor."""
    [(text, buffer)] = named_tensors
    request = json.loads(text)
    try:
        answer = {"result": COMMANDS[request["command"]](model, request, buffer)}
    except Exception as error:  # see the module's docstring
        answer = {"error": f"{type(error).__name__}: {error}"}
    path = f"{request['reply']}.{dist.get_rank() if dist.is_initialized() else 0}"
    with open(path + ".tmp", "w") as file:
        json.dump(answer, file)
    os.replace(path + ".tmp", path)


def load(model: nn.Module, request: Mapping[str, Any], buffer: Tensor) -> bool:
    """Load the bucket of `buffer` and request["entries"] (name, shape, dtype, byte offset), the first of a publish with
    request["first"]; see `BucketLoader.load`."""
    entries = [
        (name, TensorSpec(tuple(shape), getattr(torch, dtype)), offset)
        for name, shape, dtype, offset in request["entries"]
    ]
    loader = _loader(model)
    if request["first"]:
        loader.begin()
    return loader.load(Bucket(buffer, entries))


@functools.cache
def _loader(model: nn.Module) -> BucketLoader:
    return BucketLoader(model)


def poison(model: nn.Module, request: Mapping[str, Any], buffer: Tensor) -> int:
    """Fill every floating parameter with NaN, so that `poisoned` finds those that a publish does not reach."""
    filled = 0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dim() > 0:
                parameter.fill_(float("nan"))
                filled += 1
    return filled


def poisoned(model: nn.Module, request: Mapping[str, Any], buffer: Tensor) -> list[str]:
    """The parameters that still hold a NaN."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.dim() > 0 and bool(parameter.isnan().any())
    ]


def digests(model: nn.Module, request: Mapping[str, Any], buffer: Tensor) -> dict[str, str]:
    """`tensor_digest` of every tensor in request["shapes"] {Hugging Face name: shape}, put together again from the
    engine's fused and sharded parameters."""
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(shape) for name, shape in request["shapes"].items()}
    return {name: tensor_digest(_read_back(parameters, name, shapes)) for name in shapes}


def nothing(model: nn.Module, request: Mapping[str, Any], buffer: Tensor) -> None:
    """Only shows that the scheduler answers."""


COMMANDS = {"load": load, "poison": poison, "poisoned": poisoned, "digests": digests, "nothing": nothing}


def _read_back(parameters: Mapping[str, Tensor], name: str, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    shape = shapes[name]
    if name in parameters:
        return _whole(parameters[name].detach(), shape, ranks, name)
    if match := EXPERT.fullmatch(name):
        prefix, expert, part = match.groups()
        if part == "down_proj":
            return _whole(parameters[f"{prefix}.w2_weight"].detach()[int(expert)], shape, ranks, name)
        both = parameters[f"{prefix}.w13_weight"].detach()[int(expert)]
        half = both.shape[0] // 2
        return _whole(both[:half] if part == "gate_proj" else both[half:], shape, ranks, name)
    for part, (fused, parts) in FUSED.items():
        if f".{part}." in name and (fused_name := name.replace(f".{part}.", f".{fused}.")) in parameters:
            rows = [shapes[name.replace(f".{part}.", f".{other}.")][0] // ranks for other in parts]
            parameter, at = parameters[fused_name].detach(), parts.index(part)
            if sum(rows) != parameter.shape[0]:
                raise ValueError(f"{fused_name} has {parameter.shape[0]} rows, {sum(rows)} expected")
            start = sum(rows[:at])
            return _whole(parameter[start : start + rows[at]], shape, ranks, name)
    raise KeyError(f"the engine's model {sorted(parameters)[:3]} … has no parameter for {name}")


def _whole(local: Tensor, shape: tuple[int, ...], ranks: int, name: str) -> Tensor:
    """The tensor of all tensor-parallel ranks; rows that pad the vocabulary are cut."""
    if local.shape == shape or ranks == 1:
        whole = local
    else:
        pieces = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(ranks)]
        dist.all_gather(pieces, local.contiguous())
        whole = torch.cat(pieces, dim=1 if local.dim() > 1 and local.shape[1] * ranks == shape[1] else 0)
    whole = whole[: shape[0]]
    if tuple(whole.shape) != shape:
        raise ValueError(f"{name} is {list(whole.shape)} in the engine, {list(shape)} expected")
    return whole
