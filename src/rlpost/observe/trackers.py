"""Where else the metrics go: TensorBoard and Weights & Biases, loaded only where they are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Trackers:
    """Sends each step's metrics on. tensorboard: event files under `<run_dir>/tensorboard`; wandb: a run named `name`
    (its project, mode and key come from wandb's own environment variables).

    Raises ImportError, saying what to install or switch off, where a package is missing.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        tensorboard: bool = True,
        wandb: bool = False,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        self._directory = Path(run_dir)
        self._tensorboard = _import("tensorboard", "torch.utils.tensorboard") if tensorboard else None
        self._writer: Any = None
        self._wandb = None
        if wandb:
            self._wandb = _import("wandb", "wandb").init(
                dir=str(run_dir), name=name, id=name, resume="allow", config=dict(config or {})
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: float(value) for name, value in metrics.items() if name != "step" and math.isfinite(value)}
        if self._tensorboard is not None:
            if self._writer is None:
                # What an earlier attempt wrote from this step on is hidden, as it is cut from metrics.jsonl.
                self._writer = self._tensorboard.SummaryWriter(self._directory / "tensorboard", purge_step=step)
            for name, value in finite.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        if self._wandb is not None:
            self._wandb.log(finite, step=step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()


def _import(key: str, module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"tracker.{key}=true needs the package {key}: `pip install {key}`, or set tracker.{key}=false ({error})"
        ) from error
