"""fp16: the loss scale keeps small gradients, falls where they overflow, and is in no number that a step reports."""

import json
import math

import pytest
from tiny_models import (
    OPTIM,
    Oracle,
    largest_difference,
    make_policy,
    pack,
    policy_loss,
    random_sequences,
    save_model,
    token_mean,
)

from rlpost.config.schema import OptimConfig
from rlpost.policy.loss_scale import scale_is_settling
from rlpost.types import LossOutput

LENGTHS = [(5, 7), (1, 1), (12, 20), (3, 1), (2, 30), (9, 4)]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return lambda kind: save_model(kind, directory)


def fp16(path, **optim):
    return make_policy(path, OptimConfig(**{**vars(OPTIM), **optim}), dtype="fp16")


def micro(seed):
    sequences = random_sequences(seed, LENGTHS)
    return pack(sequences, token_mean(sequences))


@pytest.mark.parametrize("kind", ["qwen3", "llama-tied", "qwen3-moe"])
def test_steps_are_near_plain_fp32(kind, models):
    """fp16 rounds weights and activations to 2⁻¹¹, so that a mean over tokens is off by some 1e-4. Of the weights Adam
    makes more: where a gradient is near its eps, a step moves by as much as the gradient's rounding."""
    policy, oracle = fp16(models(kind)), Oracle(models(kind))
    for seed in range(3):
        metrics, expected = policy.train_step([micro(seed)], policy_loss), oracle.step(random_sequences(seed, LENGTHS))
        assert metrics["train/skipped"] == 0 and metrics["train/loss_scale"] == 2**16
        assert metrics["train/loss"] == pytest.approx(expected["train/loss"], rel=2e-3)
        assert metrics["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=5e-3)
    assert expected["train/grad_norm"] > OPTIM.clip_grad
    assert largest_difference(policy.optimizer_tensors("master"), oracle.weights()) < OPTIM.lr * 3


def test_small_gradients_do_not_vanish(models):
    """Of a loss of a ten-thousandth they are below fp16's smallest number, 6e-8, where nothing scales it."""

    def small(head, micro):
        return LossOutput(policy_loss(head, micro).loss_N * 1e-4)

    path = models("qwen3")
    expected = make_policy(path).train_step([micro(0)], small)["train/grad_norm"]
    scaled, plain = (
        fp16(path, initial_loss_scale=scale).train_step([micro(0)], small)["train/grad_norm"] for scale in (2**24, 1)
    )
    assert scaled == pytest.approx(expected, rel=5e-3)
    assert abs(plain - expected) > 2 * abs(scaled - expected)


def test_an_overflow_halves_the_scale_and_moves_nothing(models):
    path, first = models("qwen3"), 2.0**30
    policy = fp16(path, initial_loss_scale=first)
    before = {name: tensor.clone() for name, tensor in policy.optimizer_tensors("master")}
    metrics, steps = policy.train_step([micro(0)], policy_loss), 0
    while metrics["train/skipped"]:
        assert metrics["train/loss_scale"] == first / 2**steps
        assert not math.isfinite(metrics["train/grad_norm"]) and math.isfinite(metrics["train/loss"])
        assert largest_difference(policy.optimizer_tensors("master"), before) == 0
        metrics, steps = policy.train_step([micro(0)], policy_loss), steps + 1
    assert 1 < steps < 20
    assert policy.optimizer_scalars()["updates"] == 1
    # The step that fits is that of a policy which began with its scale: overflows left no trace, the moments neither.
    other = fp16(path, initial_loss_scale=first / 2**steps)
    assert other.train_step([micro(0)], policy_loss) == metrics
    assert largest_difference(other.optimizer_tensors("master"), dict(policy.optimizer_tensors("master"))) == 0


def test_the_scale_is_in_no_number_of_a_step(models):
    """Powers of two round nothing: but for gradients that vanish, two scales give the same step."""
    runs = [fp16(models("llama-tied"), initial_loss_scale=scale) for scale in (2**12, 2**14)]
    for seed in range(2):
        one, two = (policy.train_step([micro(seed)], policy_loss) for policy in runs)
        assert two.pop("train/loss_scale") == 4 * one.pop("train/loss_scale")
        assert one == pytest.approx(two, rel=1e-5)


def test_it_grows_after_a_window_of_finite_steps_and_waits_for_hysteresis(models):
    policy = fp16(models("llama-tied"), initial_loss_scale=256.0, loss_scale_window=2, loss_scale_hysteresis=2)

    def poisoned(head, micro):
        return LossOutput(policy_loss(head, micro).loss_N * math.inf)

    losses = [policy_loss, policy_loss, policy_loss, poisoned, poisoned, policy_loss]
    scales = [policy.train_step([micro(0)], loss)["train/loss_scale"] for loss in losses]
    assert scales == [256, 256, 512, 512, 512, 256]


def test_a_restart_goes_on_bit_exactly_in_the_middle_of_the_search(models):
    optim = {"initial_loss_scale": 2.0**30, "loss_scale_window": 3}
    unbroken, resumed = fp16(models("llama-tied"), **optim), fp16(models("llama-tied"), **optim)
    while unbroken.train_step([micro(0)], policy_loss)["train/skipped"]:
        pass
    scalars = json.loads(json.dumps(unbroken.optimizer_scalars()))
    assert scalars["loss_scale"] < 2**30 and scalars["growth_tracker"] == 1
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        saved = {name: tensor.clone() for name, tensor in unbroken.optimizer_tensors(kind)}
        resumed.load_optimizer_tensors(kind, saved.__getitem__)
    resumed.load_optimizer_scalars(scalars)
    scales = []
    for seed in range(1, 5):
        metrics = unbroken.train_step([micro(seed)], policy_loss)
        assert resumed.train_step([micro(seed)], policy_loss) == pytest.approx(metrics, rel=0, nan_ok=True)
        scales.append(metrics["train/loss_scale"])
    assert len(set(scales)) > 1  # the trackers were part of it
    assert largest_difference(resumed.optimizer_tensors("master"), dict(unbroken.optimizer_tensors("master"))) == 0


def test_a_checkpoint_of_another_dtype_leaves_the_scale(models):
    policy = fp16(models("llama-tied"))
    policy.load_optimizer_scalars({"updates": 3, "calls": 4})
    assert policy.optimizer_scalars()["loss_scale"] == 2**16
    plain = make_policy(models("llama-tied"), dtype="bf16")
    plain.load_optimizer_scalars(policy.optimizer_scalars())
    assert plain.optimizer_scalars() == {"updates": 3, "calls": 4}
    assert "train/loss_scale" not in plain.train_step([micro(0)], policy_loss)


def test_what_is_poison_and_what_is_the_scale():
    assert scale_is_settling({"train/loss_scale": 2.0, "train/loss": 0.5}, "train")
    assert not scale_is_settling({"train/loss_scale": 1.0, "train/loss": 0.5}, "train")  # it cannot fall further
    assert not scale_is_settling({"train/loss_scale": 2.0, "train/loss": math.nan}, "train")
    assert not scale_is_settling({"train/loss": 0.5}, "train")  # bf16
