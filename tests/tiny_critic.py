"""A tiny critic on disk, as Transformers writes one, and its plain PyTorch oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_models import CONFIGS, OPTIM, adamw, token_mean
from torch import Tensor
from transformers import AutoModelForTokenClassification

from rlpost.config.schema import CriticConfig, ModelConfig, OptimConfig, ParallelConfig
from rlpost.losses.value import value_loss
from rlpost.policy.critic import Critic
from rlpost.types import LossOutput, MicroBatch

CLIP = 0.2


def save_critic(kind: str, directory: Path, labels: int = 1) -> Path:
    """A classifier of tokens: with one label, a critic with its head (`score`)."""
    path = directory / f"{kind}-{labels}"
    if not path.exists():
        config = CONFIGS[kind]()
        config.num_labels = labels
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForTokenClassification.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(path)
    return path


def make_critic(path: Path, optim: OptimConfig = OPTIM, dtype: str = "fp32", seed: int = 0, **parallel: Any) -> Critic:
    config = CriticConfig(**{**vars(optim)}, path=str(path))
    # The policy's path is not read where the critic has its own.
    return Critic(config, ModelConfig(path="elsewhere", dtype=dtype), ParallelConfig(**parallel), seed=seed)


def critic_loss(values_N: Tensor, micro: MicroBatch) -> LossOutput:
    """The library's, with the batch's random numbers as returns and three times as much as the former values."""
    returns_N = micro.fields["advantages"]
    loss_N, clipped_N = value_loss(values_N, 3 * returns_N, returns_N, clip=CLIP)
    return LossOutput(loss_N, {"value": values_N.detach(), "clipped": clipped_N})


class CriticOracle:
    """The same steps with Transformers, each sequence alone, and torch's AdamW."""

    def __init__(self, path: Path, optim: OptimConfig = OPTIM) -> None:
        self.model = AutoModelForTokenClassification.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.optim = optim
        self.adam = adamw(self.model, optim)

    def values(self, sequence: dict[str, Tensor]) -> Tensor:
        """Of the states before each response token."""
        return self.model(sequence["ids"][None]).logits[0, int(sequence["prompt"]) - 1 : -1, 0]

    def step(self, sequences: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        self.adam.zero_grad()
        loss, live, clipped = 0.0, [], []
        for sequence in sequences:
            values, returns, mask = self.values(sequence), sequence["advantages"], sequence["loss_mask"]
            near = torch.minimum(torch.maximum(values, 3 * returns - CLIP), 3 * returns + CLIP)
            losses = torch.stack([(values - returns) ** 2, (near - returns) ** 2]).amax(dim=0) / 2
            total = (losses * mask).sum() / token_mean(sequences)
            total.backward()
            loss += float(total.detach().double())
            live.append(values.detach()[mask > 0])
            clipped.append(((near - returns) ** 2 > (values - returns) ** 2)[mask > 0].float())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optim.clip_grad)
        self.adam.step()
        return {
            "critic/loss": loss,
            "critic/grad_norm": float(norm),
            "value": float(torch.cat(live).mean()),
            "clipped": float(torch.cat(clipped).mean()),
        }
