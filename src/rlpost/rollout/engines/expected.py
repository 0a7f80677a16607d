"""Which tensors a publish must bring to an engine, from a model's configuration alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rlpost.policy.hf_map import MIXTRAL_NAMES
from rlpost.rollout.engine import Bucket, TensorSpec


def disk_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A Transformers model's parameters under their names on disk, a tied head only under its first name.

    In memory Transformers stacks the experts of a layer, gate over up; on disk each projection of each expert is a
    tensor of its own. What comes here are views of the stacks, so writing to them fills the model.
    """
    renames = MIXTRAL_NAMES if model.config.model_type == "mixtral" else ()
    for name, parameter in model.named_parameters():
        for found, tensor in _by_expert(name, parameter.detach()):
            for ours, theirs in renames:
                found = found.replace(ours, theirs)
            yield found, tensor


def _by_expert(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    layer, experts, projection = name.partition(".experts.")
    if not experts:
        yield name, tensor
        return
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[projection]
    for number, expert in enumerate(tensor):
        for part, piece in zip(parts, expert.chunk(len(parts))):
            yield f"{layer}.experts.{number}.{part}.weight", piece


def expected_tensors(model_path: str, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Hugging Face names and shapes, all in `dtype`; a tied head only under its first name.

    They come from the model class on the meta device.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return {name: TensorSpec(tuple(tensor.shape), dtype) for name, tensor in disk_tensors(model)}


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
