"""Tiny random models of each supported family, written as Hugging Face directories, and how to fill an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rlpost.rollout.engine import Engine
from rlpost.weights.buckets import iter_buckets

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}
EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}
VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}


def save_engine_model(
    directory: Path, family: str = "qwen3", *, tied: bool = True, seed: int = 0, **fields
) -> nn.Module:
    """A two-layer fp32 model with weights large enough to have an opinion; no eos unless `fields` names one."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SHAPE, **EXPERTS.get(family, {}), "tie_word_embeddings": tied, **fields}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.eval().save_pretrained(directory)
    return model


def hf_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Under their names on disk; a tied head comes once."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else ()
    yield from ((name, tensor) for name, tensor in weights_on_disk(model).items() if name not in tied)


def weights_on_disk(model: nn.Module) -> dict[str, Tensor]:
    """The state under the names on disk, where the experts are tensors of their own."""
    found = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(expert.chunk(2) for expert in tensor):
                found[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate
                found[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                found[name.replace("down_proj", f"{e}.down_proj.weight")] = down
        else:
            found[name] = tensor
    if model.config.model_type != "mixtral":
        return found
    words = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
    for ours, theirs in words.items():
        found = {name.replace(ours, theirs): tensor for name, tensor in found.items()}
    return found


def load_weights(engine: Engine, model: nn.Module, version: int = 1) -> None:
    engine.pause()
    specs = engine.expected_tensors()
    for bucket in iter_buckets(hf_tensors(model), 1 << 20, lambda name: specs[name].dtype):
        engine.load_bucket(bucket)
    engine.flush()
    engine.commit(version)
