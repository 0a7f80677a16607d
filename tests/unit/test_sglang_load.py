"""Loading a bucket by the copies that load_weights made before: the same weights, or load_weights again."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from rlpost.rollout.engines.sglang_load import BucketLoader
from rlpost.weights.buckets import iter_buckets

PADDED, ROWS, WIDTH = 12, 10, 6


class Fused(nn.Module):
    """As SGLang's layers: q and k in one parameter, the second half of o's columns (tensor parallel), a padded
    vocabulary."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.embed = nn.Parameter(torch.full((PADDED, WIDTH), float("nan"), dtype=dtype))
        self.qk = nn.Parameter(torch.full((8, WIDTH), float("nan"), dtype=dtype))
        self.o = nn.Parameter(torch.full((WIDTH, WIDTH // 2), float("nan"), dtype=dtype))
        self.norm = nn.Parameter(torch.full((WIDTH,), float("nan"), dtype=torch.float32))
        self.calls = 0

    def load_weights(self, weights) -> None:
        self.calls += 1
        for name, tensor in weights:
            self.place(name, tensor)

    def place(self, name: str, tensor: Tensor) -> None:
        if name == "embed":
            self.embed[: tensor.shape[0]].data.copy_(tensor)
            self.embed[tensor.shape[0] :].data.fill_(0)
        elif name == "o":
            self.o.data.copy_(tensor.narrow(1, WIDTH // 2, WIDTH // 2))
        elif name == "norm":
            self.norm.data.copy_(tensor)
        else:
            self.qk.data.narrow(0, 4 * "qk".index(name), 4).copy_(tensor)


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (ROWS, WIDTH), "q": (4, WIDTH), "k": (4, WIDTH), "o": (WIDTH, WIDTH), "norm": (WIDTH,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def buckets(tensors: dict[str, Tensor], size: int = 2**16):
    return iter_buckets(tensors.items(), size, lambda name: torch.float32 if name == "norm" else torch.bfloat16)


def load(loader: BucketLoader, tensors: dict[str, Tensor], size: int = 2**16) -> list[bool]:
    loader.begin()
    return [loader.load(bucket) for bucket in buckets(tensors, size)]


def loaded(kind: type[Fused], tensors: dict[str, Tensor]) -> Fused:
    """A model that has never seen others."""
    model = kind()
    load(BucketLoader(model), tensors)
    return model


def assert_equal_to_loading(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    for (name, got), want in zip(model.named_parameters(), loaded(type(model), tensors).parameters()):
        assert torch.equal(got, want), name


@pytest.mark.parametrize("size", [16, 100, 2**16])
def test_places_are_found_once_and_then_remembered(size):
    model = Fused()
    loader = BucketLoader(model)
    assert not any(load(loader, weights(0), size))
    calls = model.calls
    for seed in (1, 2):
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))  # also the rows that pad the vocabulary, as after sleep
        assert all(load(loader, weights(seed), size))
        assert_equal_to_loading(model, weights(seed))
    assert model.calls == calls


def test_a_bucket_at_an_offset_of_its_storage():
    """As a tensor that CUDA IPC opens."""
    model = Fused()
    loader = BucketLoader(model)
    for seed in (0, 1):
        [bucket] = buckets(weights(seed))
        whole = torch.zeros(64 + bucket.buffer.numel(), dtype=torch.uint8)
        whole[64:] = bucket.buffer
        bucket.buffer = whole[64:]
        assert loader.load(bucket) == (seed == 1)
        assert_equal_to_loading(model, weights(seed))


def test_another_layout_of_buckets_is_found_anew():
    model = Fused()
    loader = BucketLoader(model)
    load(loader, weights(0))
    assert not any(load(loader, weights(1), 100))
    assert all(load(loader, weights(2)))
    assert_equal_to_loading(model, weights(2))


def test_a_model_that_moved_is_found_anew():
    model = Fused()
    loader = BucketLoader(model)
    load(loader, weights(0))
    model.qk.data = model.qk.data.clone()
    assert not any(load(loader, weights(1)))
    assert_equal_to_loading(model, weights(1))
    assert all(load(loader, weights(2)))


class Scaled(Fused):
    def place(self, name, tensor):
        super().place(name, tensor * 2)


class Cast(Fused):
    def __init__(self):
        super().__init__(torch.float32)


class Threaded(Fused):
    def place(self, name, tensor):
        thread = threading.Thread(target=super().place, args=(name, tensor))
        thread.start()
        thread.join()


class Twice(Fused):
    def place(self, name, tensor):
        super().place(name, tensor)
        self.qk.data.fill_(1)


class Cached(Fused):
    """Keeps something of its own beside its parameters."""

    def place(self, name, tensor):
        super().place(name, tensor)
        self.last = torch.empty_like(tensor).copy_(tensor)


class Picky(Fused):
    def place(self, name, tensor):
        if name != "k":
            super().place(name, tensor)


@pytest.mark.parametrize("kind", [Scaled, Cast, Threaded, Twice, Cached, Picky])
def test_a_model_that_does_more_than_copy_loads_by_itself_each_time(kind):
    model = kind()
    loader = BucketLoader(model)
    for seed in range(3):
        assert not any(load(loader, weights(seed)))
        assert model.calls == seed + 1
    fresh = loaded(kind, weights(2))
    for name in ("embed", "o", "norm"):
        assert torch.equal(getattr(model, name), getattr(fresh, name)), name
