"""What rlpost tells SGLang: the engine's arguments and the sampling parameters."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from rlpost.rollout.engine import SamplingParams
from rlpost.rollout.engines.sglang_host import HOOK

if TYPE_CHECKING:
    from rlpost.rollout.engines.sglang import SGLangEngine

CPU_TOKENS = 32768  # of the KV cache without a GPU


def engine_arguments(engine: SGLangEngine, on_gpu: bool) -> dict[str, Any]:
    """Arguments of SGLang's ServerArgs, as 0.5.18 names them; `sglang_host` knows how earlier releases do."""
    common = {
        "model_path": engine.model_path,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "load_format": "dummy",  # the weights come by publish
        "skip_tokenizer_init": True,
        "tp_size": engine.tensor_parallel,
        "mem_fraction_static": engine.memory_fraction,
        "max_running_requests": engine.max_batch,
        "random_seed": engine.seed,
        "custom_weight_loader": [HOOK],
        "log_level": "info",
        "sampling_backend": "pytorch",  # joint top-p and top-k, as in the protocol
        "grammar_backend": "none",
    }
    if not on_gpu:
        return common | {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "max_total_tokens": CPU_TOKENS,
        }
    return common | {
        "device": "cuda",
        "base_gpu_id": engine.base_gpu_id,
        "attention_backend": "triton",
        "enable_memory_saver": True,
        "cuda_graph_max_bs_decode": engine.max_batch,
        "disable_prefill_cuda_graph": True,
    }


def sampling_params(params: SamplingParams, seed: int | None) -> dict[str, Any]:
    """SGLang's names for them."""
    chosen: dict[str, Any] = {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
    }
    if seed is not None:
        chosen["sampling_seed"] = seed % 2**31
    return chosen


def check_settings(
    dtype: torch.dtype, tensor_parallel: int, memory_fraction: float, max_batch: int, transport: str
) -> None:
    """ImportError without sglang, ValueError naming every setting that cannot be."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:  # a mere folder of that name has no origin
        raise ImportError("engine.name=sglang: the package sglang is missing; pip install 'rlpost[gpu]', or use torch")
    faults = []
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        faults.append(f"engine.dtype={dtype}: fp32, bf16 or fp16")
    if tensor_parallel < 1:
        faults.append(f"engine.tensor_parallel={tensor_parallel}: at least 1")
    if not 0 < memory_fraction < 1:
        faults.append(f"engine.memory_fraction={memory_fraction}: between 0 and 1, weights and KV cache together")
    if max_batch < 1:
        faults.append(f"engine.max_batch={max_batch}: at least 1")
    if transport not in ("auto", "ipc", "host"):
        faults.append(f"transport={transport!r}: auto, ipc or host")
    if faults:
        raise ValueError("; ".join(faults))
