"""Models of well-known shapes with random weights, for programs that measure speed and memory.

    PYTHONPATH=src python benchmarks/models.py qwen3-0.6b DIR --tokenizer …/SmolLM2-135M-Instruct

writes config.json, the weights and the tokenizer, so that `model.path=DIR` trains. The tokenizer's vocabulary may be
smaller than the model's: ids above it decode to nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from rlpost.rollout.engines.expected import expected_tensors

DENSE = {"max_position_embeddings": 4096, "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
SMALL = DENSE | {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 3072, "num_hidden_layers": 28}
LARGE = DENSE | {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 12288, "num_hidden_layers": 36}
TINY = {
    "max_position_embeddings": 4096,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "vocab_size": 49152,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "norm_topk_prob": True}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"}  # SmolLM2's

SHAPES: dict[str, tuple[type[PreTrainedConfig], dict]] = {
    "qwen3-tiny": (Qwen3Config, TINY | {"tie_word_embeddings": True}),
    "qwen3-0.6b": (Qwen3Config, SMALL | {"tie_word_embeddings": True}),
    # The same with 16 experts of a quarter of its MLP, of which 4 are active.
    "qwen3-0.6b-moe": (Qwen3MoeConfig, SMALL | EXPERTS | {"tie_word_embeddings": True}),
    "qwen3-8b": (Qwen3Config, LARGE | {"tie_word_embeddings": False}),
}


def model_config(shape: str, layers: int | None = None) -> PreTrainedConfig:
    """layers: as many as this, where it is not the shape's own number."""
    kind, sizes = SHAPES[shape]
    chosen = sizes if layers is None else sizes | {"num_hidden_layers": layers}
    return kind(**chosen, **IDS, architectures=[kind.__name__.replace("Config", "ForCausalLM")])


class RandomWeights:
    """Weights of the model in a directory with a config.json, in bf16: a publisher's policy without a trainer.

    Matrices are drawn with the deviation that Transformers begins with, everything else (norms) is 1.
    """

    def __init__(self, path: str | Path, device: torch.device | str, *, seed: int = 0, dtype=torch.bfloat16):
        generator = torch.Generator(device).manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}
        for name, spec in expected_tensors(str(path), dtype).items():
            tensor = torch.ones(spec.shape, dtype=dtype, device=device)
            self.tensors[name] = tensor.normal_(0, 0.02, generator=generator) if tensor.dim() > 1 else tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def hf_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, tensor if dtype is None else tensor.to(dtype)


def write_model(path: str | Path, config: PreTrainedConfig, device: torch.device | str) -> None:
    """A Hugging Face directory with random weights in bf16."""
    config.save_pretrained(path)
    tensors = RandomWeights(path, device).tensors
    save_file(
        {name: tensor.cpu() for name, tensor in tensors.items()}, Path(path) / "model.safetensors", {"format": "pt"}
    )


def write_tokenizer(path: str | Path, tokenizer: str | Path) -> None:
    """Another model's tokenizer into a directory, its end tokens into the directory's configuration."""
    found = AutoTokenizer.from_pretrained(tokenizer)
    found.save_pretrained(path)
    file = Path(path) / "config.json"
    ids = {"bos_token_id": found.bos_token_id, "eos_token_id": found.eos_token_id}
    file.write_text(json.dumps(json.loads(file.read_text()) | ids, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="A model directory with random weights.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a directory with a tokenizer")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_model(given.directory, model_config(given.shape, given.layers), device)
    write_tokenizer(given.directory, given.tokenizer)
    print(given.directory)


if __name__ == "__main__":
    main()
