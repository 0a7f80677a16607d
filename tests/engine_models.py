"""Tiny random models of each supported family, written as Hugging Face directories, and how to fill an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rlpost.rollout.engine import Engine
from rlpost.weights.buckets import iter_buckets

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
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
    model = model_class(config_class(**{**SHAPE, "tie_word_embeddings": tied, **fields}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.eval().save_pretrained(directory)
    return model


def hf_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A tied head comes once."""
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())


def load_weights(engine: Engine, model: nn.Module, version: int = 1) -> None:
    engine.pause()
    specs = engine.expected_tensors()
    for bucket in iter_buckets(hf_tensors(model), 1 << 20, lambda name: specs[name].dtype):
        engine.load_bucket(bucket)
    engine.flush()
    engine.commit(version)
