"""Which tensors a publish must bring to an engine, from a model's configuration alone."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from rlpost.rollout.engine import Bucket, TensorSpec

NOT_WEIGHTS = ("rotary_emb.inv_freq",)  # buffers that old checkpoints hold


def expected_tensors(model_path: str, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Hugging Face names and shapes, all in `dtype`; a tied head only under its first name.

    They come from the model class on the meta device. Transformers fuses the experts of a mixture in memory, so for
    those the names and shapes are read off the safetensors headers in `model_path`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if any(".experts." in name for name in shapes):
        shapes = _checkpoint_shapes(model_path)
        if config.tie_word_embeddings:
            shapes.pop("lm_head.weight", None)
    return {name: TensorSpec(shape, dtype) for name, shape in shapes.items()}


def bucket_faults(bucket: Bucket, expected: dict[str, TensorSpec]) -> list[str]:
    """What in the bucket is not a tensor of the model, in words."""
    faults = []
    for name, spec, _ in bucket.entries:
        if name not in expected:
            faults.append(f"{name!r} is not a tensor of this model")
        elif spec != expected[name]:
            want = expected[name]
            faults.append(f"{name!r} is {spec.dtype} {list(spec.shape)}, expected {want.dtype} {list(want.shape)}")
    return faults


def _checkpoint_shapes(model_path: str) -> dict[str, tuple[int, ...]]:
    files = sorted(Path(model_path).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model_path}: a mixture-of-experts model needs its safetensors here, for its tensors' names")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (a handle cannot be iterated over)
                if not name.endswith(NOT_WEIGHTS):
                    shapes[name] = tuple(handle.get_slice(name).get_shape())
    return shapes
