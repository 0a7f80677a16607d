"""What a rank keeps for itself in a checkpoint, as JSON plus safetensors: no pickle, so loading one runs no code."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

TENSOR, TUPLE = "__tensor__", "__tuple__"


def encode_rank_state(rank: int, values: Mapping[str, Any]) -> dict[str, bytes]:
    """The content of `rank_<rank>.json` and, where there are tensors, `.safetensors`.

    values: JSON values, tuples and tensors, nested as you like. Raises TypeError naming the field of anything else.
    """
    tensors: dict[str, Tensor] = {}
    encoded = _encode(dict(values), "rank_state", tensors)
    files = {f"rank_{rank:05d}.json": json.dumps(encoded).encode()}
    return files | ({f"rank_{rank:05d}.safetensors": save(tensors)} if tensors else {})


def read_rank_state(directory: Path, rank: int) -> dict[str, Any]:
    path = directory / f"rank_{rank:05d}.json"
    held = path.with_suffix(".safetensors")
    tensors = load_file(held) if held.is_file() else {}
    return _decode(json.loads(path.read_text()), tensors)


def seed_generators(seed: int) -> None:
    """Put every global generator of this process at its start: a user's reward may draw from any of them."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """The state of every global generator of this process: Python's, NumPy's, torch's, the CUDA device's."""
    name, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put back what `rng_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _encode(value: Any, field: str, tensors: dict[str, Tensor]) -> Any:
    match value:
        case Tensor():
            tensors[field] = value.detach().cpu().contiguous().clone()  # safetensors refuses shared memory
            return {TENSOR: field}
        case dict():
            for key in value:
                if not isinstance(key, str) or key in (TENSOR, TUPLE):
                    raise TypeError(f"{field} has the key {key!r}; keys must be strings")
            return {key: _encode(item, f"{field}.{key}", tensors) for key, item in value.items()}
        case tuple():
            return {TUPLE: [_encode(item, f"{field}.{i}", tensors) for i, item in enumerate(value)]}
        case list():
            return [_encode(item, f"{field}.{i}", tensors) for i, item in enumerate(value)]
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise TypeError(f"{field} is a {type(value).__name__}; JSON values, tuples and tensors can be kept")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]]
    if TUPLE in value:
        return tuple(_decode(item, tensors) for item in value[TUPLE])
    return {key: _decode(item, tensors) for key, item in value.items()}
