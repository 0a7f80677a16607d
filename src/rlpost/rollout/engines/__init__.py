"""The engines, by the name in `engine.name`."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from rlpost.config.schema import Config, EngineConfig

if TYPE_CHECKING:
    import torch

    from rlpost.rollout.engine import Engine


def check_installed(name: str) -> None:
    """ConfigError where the packages of this engine are not there."""
    from rlpost.config.compose import ConfigError  # an engine alone needs no Hydra

    if name == "sglang" and importlib.util.find_spec("sglang") is None:
        raise ConfigError(
            ["engine.name=sglang, but SGLang is not installed: pip install 'rlpost[gpu]', or choose engine.name=torch"]
        )


def prestart(config: Config) -> None:
    """Begin, on the ranks that will have an engine's process, what of its start needs no GPU and no model."""
    if config.engine.name != "sglang" or not any(phase.name == "rollout" for phase in config.phases):
        return
    if int(os.environ.get("RANK", "0")) % config.engine.tensor_parallel:
        return
    from rlpost.rollout.engines import sglang_process
    from rlpost.teacher import build_teacher_config

    teachers_own = config.teacher is not None and build_teacher_config(config.teacher).own_engine
    sglang_process.prestart(2 if teachers_own else 1)


def build_engine(config: EngineConfig, model_path: str, *, dtype: torch.dtype, seed: int = 0) -> Engine:
    """The engine that `config.name` names, not started. dtype: of its weights and activations. seed:
    of an engine that draws its own random numbers, another on every rank."""
    if config.name == "torch":
        if config.extra:
            raise ValueError(f"engine.extra={config.extra}: the torch engine takes no further arguments")
        if config.tensor_parallel != 1:
            raise ValueError(f"engine.tensor_parallel={config.tensor_parallel}: the torch engine has 1")
        from rlpost.rollout.engines.torch import TorchEngine

        return TorchEngine(model_path, dtype=dtype, max_batch=config.max_batch)
    if config.name == "sglang":
        from rlpost.rollout.engines.sglang import SGLangEngine

        return SGLangEngine(
            model_path,
            dtype=dtype,
            tensor_parallel=config.tensor_parallel,
            memory_fraction=config.memory_fraction,
            max_batch=config.max_batch,
            extra=config.extra,
            seed=seed,
        )
    raise ValueError(f"engine.name={config.name!r}: one of torch, sglang")
