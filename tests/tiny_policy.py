"""A tiny Qwen3 on disk, micro-batches for it and a plain loss: enough to train a real policy for a few steps."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlpost.types import LossOutput, MicroBatch

VOCABULARY = 90  # no multiple of Megatron's padding


def tiny_model(directory: Path, *, layers: int = 2, tied: bool = True, **changed: int) -> Path:
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": tied,
    }
    Qwen3ForCausalLM(Qwen3Config(**shape | changed)).save_pretrained(directory)
    return directory


def micro_batch(seed: int, length: int = 12, ranks: int = 1) -> MicroBatch:
    """One random sequence; its weights are those of the mean over the tokens of `ranks` such batches."""
    ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    predict = torch.arange(3, length - 1)
    live = torch.ones(len(predict))
    return MicroBatch(
        input_ids_T=ids,
        position_ids_T=torch.arange(length),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        max_seqlen=length,
        predict_N=predict,
        target_N=ids[predict + 1],
        sequence_N=torch.zeros(len(predict), dtype=torch.int64),
        samples=[],
        fields={"weights": live / (ranks * len(predict)), "loss_mask": live},
    )


def cross_entropy(head, micro: MicroBatch) -> LossOutput:
    return LossOutput(-head.logprobs(micro.target_N).logprobs_N)
