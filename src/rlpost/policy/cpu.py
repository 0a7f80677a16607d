"""What Megatron-core needs where there is no CUDA. With CUDA nothing here does anything.

Megatron writes `device="cuda"`, `.cuda()`, `pin_memory=True` and `tensor.type() == "torch.cuda.FloatTensor"` as
literals, and asks `torch.cuda` for the current device, streams and random states. Inside `megatron_device()` these
mean the CPU, for Megatron's own modules only; outside of it nothing is changed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_RESULT_OF_TYPE = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
}


class _CudaLiteralsMeanCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        names_device = "device" in kwargs or "pin_memory" in kwargs
        if (names_device or func in _METHODS) and _called_from_megatron():
            if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
                return args[0]
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                name = func(*args)
                return _RESULT_OF_TYPE.get(name, name)
            if torch.device(kwargs.get("device") or "cpu").type == "cuda":
                kwargs = {**kwargs, "device": torch.device("cpu")}
            kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


_METHODS = frozenset((torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.type))


def _called_from_megatron() -> bool:
    # Two frames up: __torch_function__, then whoever called the torch function.
    return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.core")


def _get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _NoStream:
    """Copies from the device to the host have nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        return None

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None:
        return None


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _gather_unequal(original: Any) -> Any:
    """Megatron's `_gather_along_first_dim`, which also takes parts of several lengths: gloo gathers equal ones only."""

    def gather(x: torch.Tensor, group: Any, output_split_sizes: Any = None, *rest: Any) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(x, group, output_split_sizes, *rest)
        longest = max(output_split_sizes)
        parts = [x.new_empty(longest, *x.shape[1:]) for _ in output_split_sizes]
        torch.distributed.all_gather(parts, torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])]), group=group)
        return torch.cat([part[:length] for part, length in zip(parts, output_split_sizes)])

    return gather


def _reduce_scatter_unequal(original: Any) -> Any:
    """The same of `_reduce_scatter_along_first_dim`."""

    def reduce_scatter(x: torch.Tensor, group: Any, input_split_sizes: Any = None, *rest: Any) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return original(x, group, input_split_sizes, *rest)
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].contiguous()

    return reduce_scatter


def _replacements() -> list[tuple[Any, str, Any]]:
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    return [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "current_stream", _nothing),
        (torch.cuda, "stream", contextlib.nullcontext),
        (torch.cuda, "get_rng_state", _get_rng_state),
        (torch.cuda, "set_rng_state", _set_rng_state),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", _NoStream()),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _on_host),
        (mappings, "_gather_along_first_dim", _gather_unequal(mappings._gather_along_first_dim)),
        (
            mappings,
            "_reduce_scatter_along_first_dim",
            _reduce_scatter_unequal(mappings._reduce_scatter_along_first_dim),
        ),
        (megatron_random, "_get_cuda_rng_state", _get_rng_state),
        (megatron_random, "_set_cuda_rng_state", _set_rng_state),
    ]


_entered = 0


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """Everything that builds or runs Megatron modules happens inside; may be nested."""
    global _entered
    if torch.cuda.is_available() or _entered:
        yield
        return
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in _replacements()]
    _entered += 1
    try:
        for owner, name, value in _replacements():
            setattr(owner, name, value)
        with _CudaLiteralsMeanCpu():
            yield
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)
        _entered -= 1
