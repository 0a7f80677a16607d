import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    CONFIGS,
    OPTIM,
    Oracle,
    largest_difference,
    load_model,
    make_policy,
    pack,
    policy_loss,
    random_sequences,
    save_model,
    token_mean,
)
from transformers import GPT2Config

from rlpost.config.schema import OptimConfig, ParallelConfig
from rlpost.parallel import Axis, check_layout, layers_of_stages
from rlpost.policy.cpu import megatron_device
from rlpost.policy.hf_io import SafetensorsReader
from rlpost.policy.layers import NORM_ROWS, RMSNorm, SwiGLU
from rlpost.policy.optimizer import learning_rate
from rlpost.policy.tokens import local_tokens
from rlpost.types import LossOutput

LENGTHS = [(5, 7), (1, 1), (12, 20), (3, 1), (2, 30), (9, 4), (6, 6), (4, 11)]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return lambda kind: save_model(kind, directory)


def all_logits(policy, micro):
    """Over every token, not only those that predict a response."""
    micro.predict_N = torch.arange(len(micro.input_ids_T))
    return policy.score([micro], lambda head, _: {"logits": head.hidden_NH @ head.weight_VH.T})[0]["logits"]


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_equal_transformers_and_weights_come_back_bit_exact(kind, models):
    path = models(kind)
    policy, reference = make_policy(path), load_model(path)
    sequences = random_sequences(0, LENGTHS)
    with torch.no_grad():
        expected = torch.cat([reference(q["ids"][None]).logits[0] for q in sequences])
    assert (all_logits(policy, pack(sequences, 1.0)) - expected).abs().max() <= 2e-5
    on_disk = load_file(path / "model.safetensors")
    returned = dict(policy.hf_tensors())
    assert returned.keys() == on_disk.keys()
    assert all(torch.equal(returned[name], on_disk[name]) for name in on_disk)


@pytest.mark.parametrize("impl", ["local", "compiled"])  # which on a CPU runs as it is written
@pytest.mark.parametrize("micro_batches", [1, 8])
@pytest.mark.parametrize("kind", ["llama-tied", "qwen2", "qwen3"])
def test_steps_equal_plain_pytorch_however_cut_into_micro_batches(kind, micro_batches, impl, models):
    policy, oracle = make_policy(models(kind), impl=impl), Oracle(models(kind))
    for seed in range(2):
        sequences = random_sequences(seed, LENGTHS)
        cut = len(sequences) // micro_batches
        micros = [pack(sequences[i : i + cut], token_mean(sequences)) for i in range(0, len(sequences), cut)]
        metrics, expected = policy.train_step(micros, policy_loss), oracle.step(sequences)
        assert metrics["train/skipped"] == 0
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert expected["train/grad_norm"] > OPTIM.clip_grad  # so that clipping is part of what was compared
    assert largest_difference(policy.hf_tensors(), oracle.weights()) < 5e-6


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_recomputed_activations_give_the_same_step(kind, recompute, models):
    sequences = random_sequences(0, LENGTHS)
    micro = pack(sequences, token_mean(sequences))
    kept, recomputed = make_policy(models(kind)), make_policy(models(kind), recompute=recompute)
    assert recomputed.train_step([micro], policy_loss) == pytest.approx(kept.train_step([micro], policy_loss), rel=1e-6)
    assert largest_difference(recomputed.hf_tensors(), dict(kept.hf_tensors())) <= 1e-6


def test_a_step_without_a_live_token_runs_and_has_no_gradient(models):
    policy = make_policy(models("qwen3"), OptimConfig(lr=1e-2))
    micro = pack(random_sequences(0, LENGTHS), 1.0)
    micro.fields |= {"weights": torch.zeros_like(micro.fields["weights"]), "loss_mask": micro.fields["loss_mask"] * 0}
    constant = policy.train_step([micro], lambda head, m: LossOutput(torch.zeros(len(m.target_N))))
    masked = policy.train_step([micro], policy_loss)
    for metrics in (constant, masked):
        assert metrics == {
            "train/loss": 0.0,
            "train/grad_norm": 0.0,
            "train/lr": 1e-2,
            "train/skipped": 0.0,
        }
    assert largest_difference(policy.hf_tensors(), load_model(models("qwen3")).state_dict()) == 0


def test_a_gradient_that_is_not_finite_moves_nothing(models):
    policy, untouched = make_policy(models("llama")), make_policy(models("llama"))
    micros = [pack(random_sequences(seed, LENGTHS), 100.0) for seed in range(3)]

    def poisoned(head, micro):
        output = policy_loss(head, micro)
        return LossOutput(output.loss_N * math.nan)

    for one in (policy, untouched):
        one.train_step(micros[:1], policy_loss)
    before = {name: tensor.clone() for name, tensor in policy.hf_tensors()}
    metrics = policy.train_step(micros[1:2], poisoned)
    assert metrics["train/skipped"] == 1
    assert largest_difference(policy.hf_tensors(), before) == 0
    for one in (policy, untouched):
        one.train_step(micros[2:], policy_loss)
    assert largest_difference(policy.hf_tensors(), dict(untouched.hf_tensors())) == 0  # the moments were spared too
    assert policy.optimizer_scalars() == {"updates": 2, "calls": 3}


def save_state(policy):
    kinds = ("master", "exp_avg", "exp_avg_sq")
    tensors = {kind: {name: t.clone() for name, t in policy.optimizer_tensors(kind)} for kind in kinds}
    return tensors, policy.optimizer_scalars()


def load_state(policy, state):
    tensors, scalars = state
    for kind, by_name in tensors.items():
        policy.load_optimizer_tensors(kind, by_name.__getitem__)
    policy.load_optimizer_scalars(scalars)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_goes_on_bit_exactly_after_a_restart(dtype, models):
    optim = OptimConfig(lr=1e-2, schedule="constant", warmup_steps=4)
    micros = [pack(random_sequences(seed, LENGTHS), 100.0) for seed in range(5)]
    unbroken = make_policy(models("qwen2-tied"), optim, dtype)
    for micro in micros[:2]:
        unbroken.train_step([micro], policy_loss)
    resumed = make_policy(models("qwen2-tied"), optim, dtype)
    state = save_state(unbroken)
    load_state(resumed, state)
    for micro in micros[2:]:
        assert resumed.train_step([micro], policy_loss) == unbroken.train_step([micro], policy_loss)
    for ours, theirs in zip(save_state(resumed)[0].values(), save_state(unbroken)[0].values()):
        assert largest_difference(ours.items(), theirs) == 0


def test_state_before_the_first_step_can_be_saved_and_loaded(models):
    first, second = make_policy(models("llama")), make_policy(models("llama"))
    load_state(second, save_state(first))
    micro = pack(random_sequences(0, LENGTHS), 100.0)
    assert first.train_step([micro], policy_loss) == second.train_step([micro], policy_loss)
    assert largest_difference(first.hf_tensors(), dict(second.hf_tensors())) == 0


def test_bf16_trains_from_fp32_masters(models):
    policy = make_policy(models("qwen3-tied"), OptimConfig(lr=1e-5), "bf16")
    on_disk = load_file(models("qwen3-tied") / "model.safetensors")
    assert largest_difference(policy.optimizer_tensors("master"), on_disk) == 0  # not rounded to bf16 on the way
    micro = pack(random_sequences(0, LENGTHS), 100.0)
    losses = [policy.train_step([micro], policy_loss)["train/loss"] for _ in range(20)]
    assert losses[-1] < losses[0]  # steps far below bf16's resolution add up in the masters
    tensors = dict(policy.hf_tensors())
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    masters = dict(policy.optimizer_tensors("master"))
    assert all(torch.equal(tensors[name], masters[name].bfloat16()) for name in masters)


def test_bf16_logits_are_near_transformers(models):
    policy, reference = make_policy(models("qwen3"), dtype="bf16"), load_model(models("qwen3"))
    sequences = random_sequences(0, LENGTHS)
    with torch.no_grad():
        expected = torch.cat([reference(q["ids"][None]).logits[0] for q in sequences])
    logits = all_logits(policy, pack(sequences, 1.0)).float()
    assert (logits - expected).abs().mean() < 0.02 * expected.std()


def test_masters_are_live_and_an_average_of_them_can_be_swapped_in(models):
    policy = make_policy(models("llama-tied"))
    average = {name: shard.clone() for name, shard in policy.masters().items()}
    start = {name: t.clone() for name, t in policy.hf_tensors()}
    policy.train_step([pack(random_sequences(0, LENGTHS), 100.0)], policy_loss)
    assert largest_difference(policy.hf_tensors(), start) > 1e-3
    assert largest_difference(policy.gather_masters(average), start) == 0
    trained = {name: t.clone() for name, t in policy.gather_masters(policy.masters())}
    for name, shard in policy.masters().items():
        shard.copy_(average[name])
    policy.sync_from_masters()
    assert largest_difference(policy.hf_tensors(), start) == 0
    for name, shard in policy.scatter_masters(trained.__getitem__).items():
        policy.masters()[name].copy_(shard)
    policy.sync_from_masters()
    assert largest_difference(policy.hf_tensors(), trained) == 0


def test_scoring_leaves_no_trace(models):
    policy = make_policy(models("llama"))
    sequences = random_sequences(0, LENGTHS)
    micros = [pack(sequences[:3], 1.0), pack(sequences[3:], 1.0)]
    random_state = torch.get_rng_state()
    results = policy.score(micros, lambda head, m: {"logp": head.logprobs(m.target_N).logprobs_N})
    assert torch.equal(torch.get_rng_state(), random_state)
    oracle = Oracle(models("llama"))
    with torch.no_grad():
        expected = torch.cat([oracle.logprobs(q) for q in sequences])
    logprobs = torch.cat([result["logp"] for result in results])
    assert not logprobs.requires_grad
    assert (logprobs - expected).abs().max() < 2e-5


def test_padding_for_sequence_parallelism_is_a_sequence_of_its_own():
    micro = pack(random_sequences(0, [(3, 2), (2, 2)]), 1.0)
    tokens = local_tokens(micro, Axis(None, 0, 1), 4)
    assert tokens.query_lengths == tokens.key_lengths == [5, 4, 3]
    assert tokens.position_ids_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert tokens.input_ids_T.tolist() == [*micro.input_ids_T.tolist(), 0, 0, 0]
    assert torch.equal(tokens.predict_R, micro.predict_N)


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_ranks_hold_two_chunks_of_every_sequence(ranks):
    micro = pack(random_sequences(0, [(3, 2), (12, 33), (2, 2), (1, 1)]), 1.0)
    parts = [local_tokens(micro, Axis(None, rank, ranks), multiple=2) for rank in range(ranks)]
    assert len({len(part.input_ids_T) for part in parts}) == 1
    assert len(parts[0].input_ids_T) % 2 == 0
    together = torch.cat([part.input_ids_T for part in parts])
    positions = torch.cat([part.position_ids_T for part in parts])
    for part in parts:
        assert torch.equal(together[part.predict_N], micro.input_ids_T[micro.predict_N])
        queries, keys = part.position_ids_T.split(part.query_lengths), part.keys_K.split(part.key_lengths)
        for query, key in zip(queries, keys):
            assert positions[key].tolist() == list(range(int(query[-1]) + 1))  # all up to the piece's last token
    rows = torch.cat([part.rows_R for part in parts])
    assert sorted(rows.tolist()) == list(range(len(micro.target_N)))
    assert all(
        torch.isin(micro.sequence_N[a.rows_R], micro.sequence_N[b.rows_R]).sum() == 0
        for a in parts
        for b in parts
        if a is not b
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocked_norm_and_activation_equal_their_definitions(dtype):
    rows = NORM_ROWS + 3  # more than one block, and one that is not full
    torch.manual_seed(0)
    config = SimpleNamespace(use_cpu_initialization=True, params_dtype=dtype, sequence_parallel=False)
    norm, activation = RMSNorm(config, hidden_size=16, eps=1e-5), SwiGLU(config)
    weight = torch.randn(16).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
    x = torch.randn(rows, 1, 16).to(dtype).requires_grad_()
    x64, weight64 = x.detach().double().requires_grad_(), weight.double().requires_grad_()
    gate, up = x64.chunk(2, dim=-1)
    for ours, reference in (
        (norm(x), x64 * (x64.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight64),
        (activation(x), gate * gate.sigmoid() * up),
    ):
        grad = torch.randn(ours.shape).to(dtype)
        x.grad = x64.grad = None
        ours.backward(grad)
        reference.backward(grad.double())
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(ours, reference.to(dtype), **close)
        torch.testing.assert_close(x.grad, x64.grad.to(dtype), **close)
    precision = 1e-4 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(norm.weight.grad, weight64.grad.to(dtype), rtol=precision, atol=precision)


def test_schedules():
    rates = [learning_rate(OptimConfig(lr=1.0, warmup_steps=2), step, None) for step in range(4)]
    assert rates == [0.5, 1.0, 1.0, 1.0]
    linear = OptimConfig(lr=1.0, schedule="linear", warmup_steps=1, min_lr=0.2)
    assert [learning_rate(linear, step, 5) for step in (0, 1, 3, 5, 9)] == pytest.approx([1.0, 1.0, 0.6, 0.2, 0.2])
    cosine = OptimConfig(lr=1.0, schedule="cosine")
    assert [learning_rate(cosine, step, 4) for step in (0, 1, 2, 4)] == pytest.approx(
        [1.0, 0.5 + 0.5 * math.cos(math.pi / 4), 0.5, 0.0]
    )
    with pytest.raises(ValueError, match="needs the number of steps"):
        learning_rate(cosine, 0, None)
    with pytest.raises(ValueError, match="'step': allowed are constant, linear, cosine"):
        learning_rate(OptimConfig(schedule="step"), 0, 1)


def test_layouts_that_do_not_fit_do_the_arithmetic():
    assert check_layout(ParallelConfig(tensor=2), 8) == 4
    with pytest.raises(ValueError, match="6 ranks are not a multiple of 4 = tensor 4 × pipeline 1 × context 1"):
        check_layout(ParallelConfig(tensor=4), 6)
    with pytest.raises(ValueError, match=r"parallel\.virtual_pipeline=2 needs parallel\.pipeline > 1"):
        check_layout(ParallelConfig(virtual_pipeline=2), 2)
    assert check_layout(ParallelConfig(tensor=2, pipeline=2, context=2, sequence=True, expert=2), 16) == 2
    with pytest.raises(ValueError, match="ranks 4 = tensor 1 × .* data 4 are no multiple of 3 = expert 3"):
        check_layout(ParallelConfig(expert=3), 4)
    with pytest.raises(ValueError, match=r"parallel\.sequence=true needs parallel\.tensor > 1"):
        check_layout(ParallelConfig(sequence=True), 2)
    with pytest.raises(ValueError, match=r"parallel\.tensor=0"):
        check_layout(ParallelConfig(tensor=0), 2)


def test_layers_of_stages_are_as_even_as_can_be_with_fewer_at_the_ends():
    dealt = {(4, 2): [2, 2], (5, 2): [3, 2], (30, 4): [7, 8, 8, 7], (9, 4): [2, 3, 3, 1], (5, 4): [2, 1, 1, 1]}
    for (layers, stages), expected in dealt.items():
        assert layers_of_stages(layers, stages) == expected
    for stages in range(1, 9):
        for layers in range(stages, 40):
            counts = layers_of_stages(layers, stages)
            assert len(counts) == stages and sum(counts) == layers and min(counts) >= 1
            assert len(set(counts[1:-1])) <= 1  # what Megatron can build
    with pytest.raises(ValueError, match="parallel.pipeline=4 is more than the 3 layers"):
        layers_of_stages(3, 4)


def test_models_that_are_not_supported_are_refused_by_name(models, tmp_path):
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="model_type is 'gpt2'; supported are llama, qwen2, qwen3"):
        make_policy(tmp_path / "gpt2")
    config = CONFIGS["llama"]()
    config.attention_bias = True
    config.save_pretrained(tmp_path / "biased")
    with pytest.raises(ValueError, match="attention_bias is True"):
        make_policy(tmp_path / "biased")
    with pytest.raises(ValueError, match=r"model\.dtype='fp8': allowed are fp32, bf16"):
        make_policy(models("llama"), dtype="fp8")


def test_weights_that_do_not_match_the_configuration_are_named(models, tmp_path):
    tensors = load_file(models("llama") / "model.safetensors")

    def write(name, changed):
        directory = tmp_path / name
        CONFIGS["llama"]().save_pretrained(directory)
        save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    norm = "model.layers.1.input_layernorm.weight"
    with pytest.raises(ValueError, match=f"it lacks {norm}"):
        make_policy(write("missing", {k: v for k, v in tensors.items() if k != norm}))
    with pytest.raises(ValueError, match=r"it has unknown model\.layers\.7\.extra"):
        make_policy(write("extra", {**tensors, "model.layers.7.extra": torch.zeros(1)}))
    with pytest.raises(ValueError, match=r"input_layernorm\.weight is \[65\] there and \[64\] here"):
        make_policy(write("shape", {**tensors, norm: torch.zeros(65)}))
    damaged = write("damaged", tensors)
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"damaged/model\.safetensors is damaged or no safetensors file"):
        make_policy(damaged)
    pickled = write("pickled", tensors)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickle files only \(pytorch_model\.bin\), .* may run a stranger's code"):
        make_policy(pickled)
    CONFIGS["llama"]().save_pretrained(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        make_policy(tmp_path / "empty")


def test_sharded_files_are_read_through_their_index(models, tmp_path):
    load_model(models("llama")).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    reader, expected = SafetensorsReader(tmp_path), load_file(models("llama") / "model.safetensors")
    assert reader.names() == sorted(expected)
    assert all(torch.equal(reader.get(name), tensor) for name, tensor in expected.items())
    next(tmp_path.glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(FileNotFoundError, match="00002"):
        SafetensorsReader(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is replaced where there is CUDA")
def test_only_megatron_sees_a_device_and_only_inside():
    before = torch.cuda.current_device, torch.cuda.manual_seed
    megatron = {"torch": torch, "__name__": "megatron.core.somewhere"}
    with megatron_device():
        assert eval("torch.ones(2, device='cuda').type()", megatron) == "torch.cuda.FloatTensor"
        assert eval("torch.ones(2).bfloat16().cuda().type()", megatron) == "torch.cuda.BFloat16Tensor"
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.ones(2).type() == "torch.FloatTensor"
        with pytest.raises((AssertionError, RuntimeError)):
            torch.ones(2, device="cuda")
    assert (torch.cuda.current_device, torch.cuda.manual_seed) == before
