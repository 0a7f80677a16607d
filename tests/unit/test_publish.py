"""Buckets, and publishing into a real engine."""

import gc
import weakref

import pytest
import torch
from engine_models import hf_tensors, save_engine_model

from rlpost.rollout.engine import EngineNotReady, Request, SamplingParams
from rlpost.rollout.engines.torch import TorchEngine
from rlpost.weights.buckets import iter_buckets, tensor_digest, unpack
from rlpost.weights.publish import Publisher, PublishError

REQUEST = Request([5, 9, 2], SamplingParams(8), seed=1)


class ModelPolicy:
    """The publishing half of a policy, over a Transformers model."""

    def __init__(self, model):
        self.model = model

    def hf_tensors(self, dtype=None):
        for name, tensor in hf_tensors(self.model):
            yield name, tensor if dtype is None else tensor.to(dtype)


class Replaced(ModelPolicy):
    """One tensor is another one (or left out)."""

    def __init__(self, model, name, tensor):
        super().__init__(model)
        self.name, self.tensor = name, tensor

    def hf_tensors(self, dtype=None):
        for name, tensor in super().hf_tensors(dtype):
            if name != self.name:
                yield name, tensor
            elif self.tensor is not None:
                yield name, self.tensor


def start(directory, dtype=torch.float32):
    engine = TorchEngine(str(directory), dtype=dtype)
    engine.start()
    return engine


def mixed_tensors():
    torch.manual_seed(0)
    return {
        "transposed": torch.randn(30, 50).t(),
        "strided": torch.randn(40, 12)[::3, 1::2],
        "odd": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "large": torch.randn(100, 100),
        "last": torch.arange(5),
    }


@pytest.mark.parametrize("bucket_bytes", [16, 1 << 10, 1 << 30])
def test_buckets_of_any_size_bring_the_same_tensors(bucket_bytes):
    tensors = mixed_tensors()
    found, sizes = {}, []
    for bucket in iter_buckets(iter(tensors.items()), bucket_bytes, lambda name: tensors[name].dtype):
        assert bucket.entries
        sizes.append((bucket.buffer.numel(), len(bucket.entries)))
        found |= {name: tensor.clone() for name, tensor in unpack(bucket)}
    assert list(found) == list(tensors)
    assert {k: tensor_digest(v) for k, v in found.items()} == {k: tensor_digest(v) for k, v in tensors.items()}
    assert all(size <= bucket_bytes or entries == 1 for size, entries in sizes)
    assert (len(sizes) == 1) is (bucket_bytes == 1 << 30)


def test_no_tensors_make_no_bucket_and_a_cast_is_a_cast():
    assert list(iter_buckets(iter(()), 1024, lambda name: torch.float32)) == []
    tensor = torch.randn(9, 4).t()
    (bucket,) = iter_buckets([("w", tensor)], 1024, lambda name: torch.bfloat16)
    assert torch.equal(dict(unpack(bucket))["w"], tensor.bfloat16())
    with pytest.raises(ValueError, match="bucket_bytes=8"):
        next(iter_buckets([("w", tensor)], 8, lambda name: torch.float32))


def test_at_most_two_buckets_are_alive():
    alive, most = [], 0
    for bucket in iter_buckets(((str(i), torch.zeros(250)) for i in range(20)), 1000, lambda name: torch.float32):
        alive.append(weakref.ref(bucket.buffer.untyped_storage()))
        most = max(most, sum(reference() is not None for reference in alive))
    del bucket
    gc.collect()
    assert len(alive) == 20 and most <= 2


def test_digests_know_values_shape_and_dtype_but_not_strides():
    tensor = torch.arange(12.0).view(3, 4)
    digest = tensor_digest(tensor)
    assert digest == tensor_digest(tensor.t().contiguous().t())
    changed = tensor.clone()
    changed[2, 3] += 1e-6
    others = [changed, tensor.view(4, 3), tensor.double(), tensor.view(torch.int32)]
    assert digest not in [tensor_digest(other) for other in others]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_arrives_after_a_reset(tmp_path, tied, dtype):
    model = save_engine_model(tmp_path, tied=tied)
    engine = start(tmp_path, dtype)
    publisher = Publisher(ModelPolicy(model), engine, bucket_bytes=3000, verify="always")
    metrics = publisher.publish()
    assert metrics["publish/version"] == publisher.version == engine.version == 1
    assert metrics["publish/bytes"] >= sum(p.numel() * dtype.itemsize for p in model.parameters())
    before = engine.generate([REQUEST])[0]
    engine.pause()
    with torch.no_grad():
        for weight in engine._weights.values():
            weight.fill_(-1.0)
    publisher.publish()
    assert engine.digest() == {name: tensor_digest(tensor.to(dtype)) for name, tensor in hf_tensors(model)}
    after = engine.generate([REQUEST])[0]
    assert (after.ids, after.logprobs, after.version) == (before.ids, before.logprobs, 2)


def test_bucket_sizes_do_not_change_what_is_served(tmp_path):
    model = save_engine_model(tmp_path)
    digests = []
    for bucket_bytes in (1 << 10, 1 << 30):
        engine = start(tmp_path)
        Publisher(ModelPolicy(model), engine, bucket_bytes=bucket_bytes).publish()
        digests.append(engine.digest())
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, "the policy lacks 'model.norm.weight'"),
        ("model.norm.weight", torch.zeros(31), r"'model.norm.weight' is \[31\] in the policy, \[32\] in the engine"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_sent(tmp_path, name, tensor, message):
    model, engine = save_engine_model(tmp_path), start(tmp_path)
    engine.load_bucket = lambda bucket: pytest.fail("something was sent")
    with pytest.raises(PublishError, match=message):
        Publisher(Replaced(model, name, tensor), engine).publish()


def test_a_tensor_that_the_engine_lacks_is_named(tmp_path):
    untied = save_engine_model(tmp_path / "untied", tied=False)
    save_engine_model(tmp_path / "tied")
    with pytest.raises(PublishError, match="the engine lacks 'lm_head.weight'"):
        Publisher(ModelPolicy(untied), start(tmp_path / "tied")).publish()


def test_a_failed_publish_leaves_the_version_and_a_retry_takes_the_same_candidate(tmp_path):
    model, engine = save_engine_model(tmp_path), start(tmp_path)
    publisher = Publisher(ModelPolicy(model), engine, bucket_bytes=3000, retries=0)
    publisher.publish()
    load, calls = engine.load_bucket, []

    def fail_at_third(bucket):
        calls.append(bucket)
        if len(calls) == 3:
            raise OSError("the wire broke")
        load(bucket)

    engine.load_bucket = fail_at_third
    with pytest.raises(PublishError, match=r"rank 0 could not send the weights of version 2: OSError: the wire broke"):
        publisher.publish()
    assert publisher.version == engine.version == 1
    with pytest.raises(EngineNotReady):
        engine.generate([REQUEST])
    assert publisher.publish()["publish/version"] == engine.version == 2

    calls.clear()
    publisher.retries = 1
    assert publisher.publish()["publish/version"] == 3
    assert len(calls) > 3 and engine.generate([REQUEST])[0].version == 3


def test_verification_finds_a_changed_tensor(tmp_path):
    model, engine = save_engine_model(tmp_path), start(tmp_path)
    digest = engine.digest
    engine.digest = lambda: {**digest(), "model.norm.weight": "0" * 64}
    with pytest.raises(PublishError, match=r"1 of \d+ tensors differ after loading: model.norm.weight"):
        Publisher(ModelPolicy(model), engine, verify="first", retries=0).publish()
    assert engine.version == 0
    Publisher(ModelPolicy(model), engine, verify="off").publish()
    with pytest.raises(ValueError, match="publish.verify='sometimes': one of off, first, always"):
        Publisher(ModelPolicy(model), engine, verify="sometimes")
