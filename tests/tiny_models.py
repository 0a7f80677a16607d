"""Tiny Hugging Face models with fixed weights, packed micro-batches of random tokens, and a plain PyTorch oracle."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine_models import weights_on_disk
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rlpost.config.schema import ModelConfig, OptimConfig, ParallelConfig
from rlpost.policy.megatron import MegatronPolicy
from rlpost.types import LossOutput, MicroBatch

VOCABULARY = 101  # odd, so that tensor parallelism has to pad it
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "llama-tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen2-tied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SHAPE,
        head_dim=16,
        tie_word_embeddings=False,
        moe_intermediate_size=48,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
    "mixtral": lambda: MixtralConfig(**SHAPE, tie_word_embeddings=False, num_local_experts=4, sliding_window=None),
    "qwen3-deep": lambda: Qwen3Config(**{**SHAPE, "num_hidden_layers": 8}, head_dim=16, tie_word_embeddings=False),
    "qwen3-odd": lambda: Qwen3Config(**{**SHAPE, "num_hidden_layers": 5}, head_dim=16, tie_word_embeddings=True),
    "qwen3-tied": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
}
# A large eps keeps Adam's update smooth in the gradient: else rounding noise in a tiny gradient becomes a full step.
OPTIM = OptimConfig(lr=1e-2, eps=1e-4, weight_decay=0.1, clip_grad=1.0)


def save_model(kind: str, directory: Path) -> Path:
    """A model of this kind, with every weight (norms and biases too) away from its initial value."""
    path = directory / kind
    if not path.exists():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(path)
    return path


def load_model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def make_policy(
    path: Path,
    optim: OptimConfig = OPTIM,
    dtype: str = "fp32",
    recompute: str = "none",
    router_aux_loss: float = 0.0,
    overlap: bool = False,
    impl: str = "auto",
    **parallel: Any,
) -> MegatronPolicy:
    model = ModelConfig(path=str(path), dtype=dtype, router_aux_loss=router_aux_loss, impl=impl)
    cut = ParallelConfig(**parallel)
    return MegatronPolicy(model, optim, cut, temperature=0.7, recompute=recompute, overlap=overlap)


def random_sequences(seed: int, lengths: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
    """One sequence for each (prompt length, response length), with advantages and every fifth token masked out."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for prompt, response in lengths:
        mask = torch.ones(response)
        mask[4::5] = 0
        sequences.append(
            {
                "ids": torch.randint(0, VOCABULARY, (prompt + response,), generator=generator),
                "prompt": torch.tensor(prompt),
                "loss_mask": mask,
                "advantages": torch.randn(response, generator=generator),
            }
        )
    return sequences


def token_mean(sequences: Sequence[dict[str, Tensor]]) -> float:
    """The one denominator: live tokens of the whole step."""
    return float(sum(sequence["loss_mask"].sum() for sequence in sequences))


def pack(sequences: Sequence[dict[str, Tensor]], denominator: float) -> MicroBatch:
    lengths = [len(sequence["ids"]) for sequence in sequences]
    starts = [0, *itertools.accumulate(lengths)]
    predict = [torch.arange(s + q["prompt"] - 1, s + len(q["ids"]) - 1) for s, q in zip(starts, sequences)]
    mask = torch.cat([q["loss_mask"] for q in sequences])
    return MicroBatch(
        input_ids_T=torch.cat([q["ids"] for q in sequences]),
        position_ids_T=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        max_seqlen=max(lengths),
        predict_N=torch.cat(predict),
        target_N=torch.cat([q["ids"][q["prompt"] :] for q in sequences]),
        sequence_N=torch.cat([torch.full((len(p),), b) for b, p in enumerate(predict)]),
        samples=[],
        fields={
            "loss_mask": mask,
            "weights": mask / denominator,
            "advantages": torch.cat([q["advantages"] for q in sequences]),
        },
    )


def token_loss(logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    return -advantages_N * logprobs_N + 0.05 * logprobs_N.square()


def policy_loss(head: Any, micro: MicroBatch) -> LossOutput:
    logprobs_N = head.logprobs(micro.target_N).logprobs_N
    logp = logprobs_N.detach()
    return LossOutput(token_loss(logprobs_N, micro.fields["advantages"]), {"logp": logp, "logp/max": logp})


def adamw(model: torch.nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """torch's own; norms and biases do not decay."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": decay}, {"params": rest, "weight_decay": 0.0}],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )


class Oracle:
    """The same steps with Transformers, autograd over each sequence alone, and torch's AdamW."""

    def __init__(self, path: Path, optim: OptimConfig = OPTIM, router_aux_loss: float = 0.0) -> None:
        self.model = load_model(path)
        self.optim, self.router_aux_loss = optim, router_aux_loss
        self.adam = adamw(self.model, optim)

    def logits(self, sequence: dict[str, Tensor]) -> Tensor:
        return self.model(sequence["ids"][None]).logits[0]

    def logprobs(self, sequence: dict[str, Tensor]) -> Tensor:
        prompt = int(sequence["prompt"])
        logits = self.logits(sequence)[prompt - 1 : -1] / 0.7
        return logits.log_softmax(-1).gather(1, sequence["ids"][prompt:, None])[:, 0]

    def balance(self, sequence: dict[str, Tensor]) -> Tensor:
        """Transformers' load-balancing loss of the sequence, summed over its layers; theirs is K times ours."""
        config = self.model.config
        layers = self.model(sequence["ids"][None], output_router_logits=True).router_logits
        chosen = config.num_experts_per_tok
        return sum(load_balancing_loss_func((layer,), config.num_experts, chosen) for layer in layers) / chosen

    def step(self, sequences: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        self.adam.zero_grad()
        denominator, loss = token_mean(sequences), 0.0
        live, balances = [], []
        for sequence in sequences:
            logprobs = self.logprobs(sequence)
            losses = token_loss(logprobs, sequence["advantages"]) * sequence["loss_mask"] / denominator
            losses.sum().backward()
            loss += float(losses.detach().double().sum())
            live.append(logprobs.detach()[sequence["loss_mask"] > 0])
            if self.router_aux_loss and sequence["loss_mask"].any():
                balances.append(self.balance(sequence))
        if balances:
            (self.router_aux_loss * sum(balances) / len(balances)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.clip_grad)
        self.adam.step()
        pooled = torch.cat(live)
        metrics = {
            "train/loss": loss,
            "train/grad_norm": float(norm),
            "logp": float(pooled.mean()),
            "logp/max": float(pooled.max()),
        }
        if balances:
            layers = self.model.config.num_hidden_layers
            metrics["router/aux_loss"] = float(sum(balances).detach()) / len(balances) / layers
        return metrics

    def weights(self) -> dict[str, Tensor]:
        return weights_on_disk(self.model)


def largest_difference(tensors: Any, reference: dict[str, Tensor]) -> float:
    return max(float((tensor - reference[name]).abs().max()) for name, tensor in tensors)
