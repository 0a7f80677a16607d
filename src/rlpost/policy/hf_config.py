"""What a Hugging Face directory says of its model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from rlpost.policy.hf_map import MIXTRAL_NAMES, HFMap

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def read_config(path: str | Path) -> PreTrainedConfig:
    """The model's Hugging Face configuration, refused where it asks for what is not built here."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if config.model_type not in MODEL_TYPES:
        raise ValueError(f"{path}: model_type is {config.model_type!r}; supported are {', '.join(MODEL_TYPES)}")
    for key, allowed in {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_jitter_noise": 0.0,
    }.items():
        value = getattr(config, key, allowed)
        if value != allowed:
            raise ValueError(f"{path}: {key} is {value!r}; only {allowed!r} is supported")
    return config


def head_dim(hf: PreTrainedConfig) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def make_map(hf: PreTrainedConfig) -> HFMap:
    return HFMap(
        query_groups=hf.num_key_value_heads,
        heads_per_group=hf.num_attention_heads // hf.num_key_value_heads,
        vocab_size=hf.vocab_size,
        tied=hf.tie_word_embeddings,
        renames=MIXTRAL_NAMES if hf.model_type == "mixtral" else (),
    )
