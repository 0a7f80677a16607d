"""The critic against Transformers' classifier of tokens with one label, and where its head comes from."""

import pytest
import torch
from tiny_critic import CriticOracle, critic_loss, make_critic, save_critic
from tiny_models import OPTIM, largest_difference, load_model, pack, random_sequences, save_model, token_mean

from rlpost.data.packing import pack as pack_samples
from rlpost.data.packing import unpack
from rlpost.policy.megatron import MegatronPolicy
from rlpost.types import Prompt, Sample

LENGTHS = [(5, 7), (1, 1), (12, 20), (3, 1), (2, 30), (9, 4)]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("critics")


@pytest.mark.parametrize("micro_batches", [1, 6])
@pytest.mark.parametrize("kind", ["llama-tied", "qwen2", "qwen3"])
def test_steps_equal_plain_pytorch_however_cut_into_micro_batches(kind, micro_batches, directory):
    path = save_critic(kind, directory)
    critic, oracle = make_critic(path), CriticOracle(path)
    for seed in range(2):
        sequences = random_sequences(seed, LENGTHS)
        cut = len(sequences) // micro_batches
        micros = [pack(sequences[i : i + cut], token_mean(sequences)) for i in range(0, len(sequences), cut)]
        with torch.no_grad():
            values = torch.cat([oracle.values(sequence) for sequence in sequences])
        assert (torch.cat([row["values"] for row in critic.score(micros)]) - values).abs().max() <= 2e-5
        metrics, expected = critic.train_step(micros, critic_loss), oracle.step(sequences)
        assert metrics["critic/skipped"] == 0 and metrics["critic/lr"] == OPTIM.lr
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert seed > 0 or 0 < expected["clipped"] < 1  # so that both branches of the loss are compared
    assert largest_difference(critic.model.hf_tensors(), oracle.model.state_dict()) < 5e-6


def test_samples_of_one_prompt_have_the_values_of_whole_sequences(directory):
    """They run their prompt once, and the value before the first token is the same for all of them."""
    path = save_critic("qwen3", directory)
    critic, oracle = make_critic(path), CriticOracle(path)
    random = torch.Generator().manual_seed(0)
    samples = []
    for group, lengths in enumerate([(3, 1, 5), (2,), (4, 4)]):
        prompt = torch.randint(1, 90, (7,), generator=random).tolist()
        for index, length in enumerate(lengths):
            samples.append(Sample(Prompt(group, [], prompt), group, index))
            samples[-1].response_ids = torch.randint(1, 90, (length,), generator=random).tolist()
    (micro,) = pack_samples(samples, 1000)
    rows = unpack(micro, critic.score([micro])[0]["values"])
    with torch.no_grad():
        for sample, row in zip(micro.samples, rows):
            sequence = {"ids": torch.tensor(sample.ids), "prompt": len(sample.prompt.ids)}
            torch.testing.assert_close(row, oracle.values(sequence), rtol=0, atol=2e-5)
    assert len({float(row[0]) for sample, row in zip(micro.samples, rows) if sample.group_id == 0}) == 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("head", ["none", "another shape"])
def test_a_new_head_where_the_checkpoint_has_none_of_this_shape(head, dtype, directory):
    path = save_model("qwen3", directory) if head == "none" else save_critic("qwen3", directory, labels=3)
    made = [dict(make_critic(path, seed=seed, dtype=dtype).model.hf_tensors(torch.float32)) for seed in (1, 1, 2)]
    weights = [tensors["score.weight"] for tensors in made]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert weights[0].shape == (1, 64) and torch.equal(made[0]["score.bias"], torch.zeros(1))
    assert not torch.equal(weights[0], weights[0].bfloat16().float())  # the head is fp32 in any case
    drawn = torch.cat([make_critic(path, seed=seed).model.masters()["value_head.weight"] for seed in range(20)])
    assert abs(float(drawn.mean())) < 0.002 and float(drawn.std()) == pytest.approx(0.02, rel=0.05)
    backbone = load_model(path) if head == "none" else CriticOracle(path).model
    there = {name: t for name, t in backbone.state_dict().items() if name.startswith("model.")}
    assert largest_difference([(n, made[0][n]) for n in there], there) <= (0 if dtype == "fp32" else 0.02)


def test_a_bf16_step_has_an_fp32_head(directory):
    path = save_critic("qwen3", directory)
    critic, oracle = make_critic(path, dtype="bf16"), CriticOracle(path)
    sequences = random_sequences(0, LENGTHS)
    micro = pack(sequences, token_mean(sequences))
    assert critic.score([micro])[0]["values"].dtype == torch.float32
    metrics, expected = critic.train_step([micro], critic_loss), oracle.step(sequences)
    assert metrics["critic/loss"] == pytest.approx(expected["critic/loss"], rel=0.02)
    after = dict(critic.model.hf_tensors(torch.float32))
    head = {name: oracle.model.state_dict()[name] for name in ("score.weight", "score.bias")}
    assert largest_difference([(name, after[name]) for name in head], head) < 2e-3  # of a step of 1e-2
    assert not torch.equal(after["score.weight"], after["score.weight"].bfloat16().float())


def test_the_state_goes_on_bit_by_bit(directory):
    path = save_critic("qwen3", directory)
    whole, first, second = (make_critic(path) for _ in range(3))
    sequences = random_sequences(0, LENGTHS)
    micro = pack(sequences, token_mean(sequences))
    for critic in (whole, first):
        critic.train_step([micro], critic_loss)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        second.model.load_optimizer_tensors(kind, dict(first.model.optimizer_tensors(kind)).__getitem__)
    second.model.load_optimizer_scalars(first.model.optimizer_scalars())
    assert second.train_step([micro], critic_loss) == whole.train_step([micro], critic_loss)
    assert largest_difference(second.model.hf_tensors(), dict(whole.model.hf_tensors())) == 0


def test_a_critic_is_no_place_for_a_policy_s_tensors(directory):
    """A head of values in the policy's checkpoint is refused there: it would be lost."""
    from rlpost.config.schema import ModelConfig, ParallelConfig

    path = save_critic("qwen3", directory)
    with pytest.raises(ValueError, match="score.bias, score.weight"):
        MegatronPolicy(ModelConfig(path=str(path)), OPTIM, ParallelConfig())
