import pytest
import torch
from tiny_policy import cross_entropy, micro_batch, tiny_model

from rlpost.config.schema import ModelConfig, OptimConfig, ParallelConfig
from rlpost.policy.megatron import MegatronPolicy
from rlpost.weights.snapshots import SnapshotStore


class Model:
    """fp32 masters, and the bf16 weights that they are pushed into."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.masters = {
            "a": torch.randn(7, 5, generator=generator),
            "b": torch.randn(3, generator=generator),
            "steps": torch.tensor([4]),
        }
        self.syncs = 0
        self.weights = {}
        self.sync()

    def sync(self):
        self.syncs += 1
        self.weights = {n: t.bfloat16() if t.is_floating_point() else t.clone() for n, t in self.masters.items()}


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def store(model):
    return SnapshotStore(lambda: model.masters, model.sync)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def clone(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_save_and_load_are_bitwise_and_independent_of_the_live_weights(model, store):
    before = clone(model.masters)
    store.save("teacher")
    model.masters["a"].add_(1)
    assert_equal(store.tensors("teacher"), before)
    store.load("teacher")
    assert_equal(model.masters, before)
    assert torch.equal(model.weights["a"], before["a"].bfloat16())
    assert store.tags() == ["teacher"]


def test_swap_holds_the_tag_and_restores_after_an_exception(model, store):
    store.save("teacher")
    teacher = clone(model.masters)
    model.masters["a"].mul_(3)
    former = clone(model.masters)
    with pytest.raises(ZeroDivisionError), store.swap("teacher"):
        assert_equal(model.masters, teacher)
        assert torch.equal(model.weights["a"], teacher["a"].bfloat16())
        raise ZeroDivisionError
    assert_equal(model.masters, former)
    assert torch.equal(model.weights["a"], former["a"].bfloat16())
    assert_equal(store.tensors("teacher"), teacher)
    with store.swap("teacher"):  # not stuck in the failed one
        model.masters["b"].zero_()  # lost, and no harm to the tag
    assert_equal(model.masters, former)
    assert_equal(store.tensors("teacher"), teacher)


def test_nothing_reads_or_writes_the_wrong_weights_inside_a_swap(model, store):
    store.save("teacher")
    with store.swap("teacher"):
        for misuse in (
            lambda: store.save("x"),
            lambda: store.load("teacher"),
            lambda: store.ema("student", "teacher", 0.5),
            lambda: store.tensors("student"),
            lambda: store.swap("teacher").__enter__(),
            lambda: store.drop("teacher"),
        ):
            with pytest.raises(RuntimeError, match="swap\\('teacher'\\)"):
                misuse()
        assert store.hash("teacher").keys() == model.masters.keys()


@pytest.mark.parametrize("alpha", [0.01, 0.3, 0.9])
def test_ema_is_the_students_share(model, store, alpha):
    store.save("teacher")
    teacher = clone(model.masters)
    model.masters["a"].add_(1)
    model.masters["steps"].add_(1)
    store.ema("student", "teacher", alpha)
    expected = (1 - alpha) * teacher["a"].double() + alpha * model.masters["a"].double()
    torch.testing.assert_close(store.tensors("teacher")["a"].double(), expected, rtol=3e-7, atol=3e-7)
    assert store.tensors("teacher")["a"].dtype == torch.float32
    assert torch.equal(store.tensors("teacher")["steps"], torch.tensor([5]))  # not floating: copied


def test_ema_with_alpha_one_copies_every_bit(model, store):
    store.save("teacher")
    model.masters["a"][0, 0] = 1e-42  # denormal
    model.masters["a"][0, 1] = -0.0
    model.masters["a"][0, 2] = torch.nan
    store.ema("student", "teacher", 1.0)
    assert store.hash("teacher") == store.hash("student")


@pytest.mark.parametrize("alpha", [0, -0.1, 1.5, float("nan")])
def test_ema_rejects_a_rate_outside_its_range(store, alpha):
    store.save("teacher")
    with pytest.raises(ValueError, match="0 < alpha ≤ 1"):
        store.ema("student", "teacher", alpha)


def test_ema_of_a_policy_follows_an_fp64_oracle_over_500_steps_at_a_small_learning_rate(tmp_path):
    """A bf16 EMA would not move most weights: α·lr is far below its resolution. The experiment can tell them apart."""
    policy = MegatronPolicy(
        ModelConfig(path=str(tiny_model(tmp_path, layers=1))), OptimConfig(lr=1e-6), ParallelConfig()
    )
    store = SnapshotStore(policy.masters, policy.sync_from_masters)
    store.save("teacher")
    initial = {name: tensor.double() for name, tensor in policy.masters().items()}
    oracle, in_bf16 = clone(initial), {name: tensor.bfloat16() for name, tensor in initial.items()}
    batch = micro_batch(0, length=8)
    for _ in range(500):
        policy.train_step([batch], cross_entropy)
        store.ema("student", "teacher", 0.01)
        for name, live in policy.masters().items():
            oracle[name].lerp_(live.double(), 0.01)
            in_bf16[name].lerp_(live.bfloat16(), 0.01)

    def error(tensors):
        flat = torch.cat([tensors[name].double().flatten() - oracle[name].flatten() for name in oracle])
        return flat.norm().item()

    moved = error(initial)
    assert moved > 0
    assert error(store.tensors("teacher")) < 0.01 * moved
    assert error(in_bf16) > 0.5 * moved


def test_ema_refuses_half_precision():
    live = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    store = SnapshotStore(lambda: live, lambda: None)
    store.save("teacher")
    with pytest.raises(ValueError, match="fp32.*'w'"):
        store.ema("student", "teacher", 0.5)


def test_distance_parts_pool_over_ranks(model, store):
    store.save("teacher")
    model.masters["a"] += 0.5
    difference, norm = store.distance_parts("teacher")
    assert difference == pytest.approx(0.25 * 35)
    assert norm == pytest.approx(sum(model.masters[n].double().square().sum().item() for n in "ab"))


def test_distance_is_exact_enough_for_large_tensors():
    live = {"w": torch.randn(2**23 + 5, generator=torch.Generator().manual_seed(0))}
    store = SnapshotStore(lambda: live, lambda: None)
    store.save("teacher")
    live["w"] += 1e-3
    difference, norm = store.distance_parts("teacher")
    expected = (live["w"].double() - store.tensors("teacher")["w"].double()).square().sum().item()
    assert difference == pytest.approx(expected, rel=1e-5)
    assert norm == pytest.approx(live["w"].double().square().sum().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("b"), "tensor 'b' is in .* but not in"),
        (lambda m: m.update(c=torch.zeros(1)), "tensor 'c' is in .* but not in"),
        (lambda m: m.update(b=torch.zeros(4)), r"tensor 'b' is torch.float32 \[4\] .* but torch.float32 \[3\]"),
        (lambda m: m.update(b=torch.zeros(3, dtype=torch.float64)), "tensor 'b' is torch.float64"),
    ],
)
def test_a_difference_names_the_tensor(model, store, change, message):
    store.save("teacher")
    change(model.masters)
    for operation in (
        lambda: store.save("teacher"),
        lambda: store.ema("student", "teacher", 0.5),
        lambda: store.copy("student", "teacher"),
        lambda: store.put("teacher", model.masters | {"a": torch.zeros(1)}),
        lambda: store.distance_parts("teacher"),
    ):
        with pytest.raises(ValueError, match="tensor '"):
            operation()
    with pytest.raises(ValueError, match=message):
        store.save("teacher")
    for operation in (lambda: store.load("teacher"), lambda: store.swap("teacher").__enter__()):
        with pytest.raises(ValueError, match="tensor '"):
            operation()


def test_copy_put_drop_and_unknown_tags(model, store):
    store.copy("student", "reference")
    model.masters["a"].add_(1)
    store.put("teacher", iter(model.masters.items()))
    assert store.hash("teacher") == store.hash("student") != store.hash("reference")
    store.copy("reference", "teacher")
    assert store.hash("teacher") == store.hash("reference")
    store.drop("reference")
    assert store.tags() == ["teacher"]
    with pytest.raises(KeyError, match="no snapshot 'reference'; there are: teacher"):
        store.load("reference")


def test_a_saved_student_comes_before_the_live_one(model, store):
    store.save("student")
    model.masters["a"].add_(1)
    store.copy("student", "teacher")
    assert not torch.equal(store.tensors("teacher")["a"], model.masters["a"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: pinned memory and the side stream")
def test_on_cuda_copies_are_waited_for():
    live = {"w": torch.randn(2**22, device="cuda")}
    store = SnapshotStore(lambda: live, lambda: None)
    expected = live["w"].cpu()
    store.save("teacher")
    live["w"].zero_()  # queued after the copy
    assert store.tensors("teacher")["w"].is_pinned()
    assert torch.equal(store.tensors("teacher")["w"], expected)
    live["w"].fill_(1)
    store.ema("student", "teacher", 0.25)
    torch.testing.assert_close(store.tensors("teacher")["w"], expected.lerp(torch.ones(()), 0.25))
    with store.swap("teacher"):
        assert torch.equal(live["w"].cpu(), store.tensors("teacher")["w"])
    assert torch.equal(live["w"], torch.ones_like(live["w"]))
