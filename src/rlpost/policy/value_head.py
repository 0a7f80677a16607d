"""A critic's output: one number for each position that predicts a response token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rlpost.policy.hf_io import SafetensorsReader

INITIAL_STD = 0.02


@dataclass
class ValueHead:
    """The critic's head over the N positions that predict response tokens, as `Head` is the policy's."""

    hidden_NH: Tensor
    linear: nn.Linear  # [1, H] with bias, fp32

    def parameters(self) -> list[Tensor]:
        return list(self.linear.parameters())

    def values(self) -> Tensor:
        """[N] in fp32: of the states before each response token."""
        return self.linear(self.hidden_NH.to(self.linear.weight.dtype)).squeeze(1)


def with_initial_head(reader: SafetensorsReader, hidden_size: int, seed: int) -> Callable[[str], Tensor]:
    """`reader.get` with a new head, N(0, 0.02) and zero bias, where the checkpoint has none or one of another shape
    (a classifier's). The same on every rank."""
    shapes = {"score.weight": (1, hidden_size), "score.bias": (1,)}
    given = {name: reader.get(name) for name in shapes.keys() & set(reader.names())}
    head = {name: tensor for name, tensor in given.items() if tuple(tensor.shape) == shapes[name]}
    if "score.weight" not in head:
        random = torch.Generator().manual_seed(seed)
        head = {"score.weight": torch.empty(1, hidden_size).normal_(0.0, INITIAL_STD, generator=random)}
    head.setdefault("score.bias", torch.zeros(1))
    return lambda name: head[name] if name in head else reader.get(name)
