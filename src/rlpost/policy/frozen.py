"""A model that is never trained: another network than the policy, which only scores."""

from __future__ import annotations

from pathlib import Path

import torch

from rlpost.config.schema import ModelConfig, ParallelConfig
from rlpost.policy.hf_io import SafetensorsReader
from rlpost.policy.hf_map import is_expert
from rlpost.policy.model import MegatronModel


class FrozenModel(MegatronModel):
    """The Hugging Face directory `model.path`, cut over the ranks as the policy is: weights alone, no gradients, no
    optimizer. Build it after the policy, whose process groups it shares.

    Raises ValueError for a model or a layout that is not supported, FileNotFoundError without weights.
    """

    def __init__(self, model: ModelConfig, parallel: ParallelConfig, *, temperature: float = 1.0) -> None:
        super().__init__(model, parallel, temperature=temperature)
        reader = SafetensorsReader(Path(model.path))
        with torch.no_grad():
            for chunk in self._chunks:
                for name, parameter in chunk.module.global_parameters():
                    axis = self.mesh.expert_tp if is_expert(name) else self.mesh.tp
                    parameter.copy_(self._map.from_hf(name, reader.get, axis.rank, axis.size))
