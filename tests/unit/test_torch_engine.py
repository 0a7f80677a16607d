"""The embedded engine against Transformers: tokens, log-probs, states."""

import threading

import pytest
import torch
from engine_models import VOCABULARY, hf_tensors, load_weights, save_engine_model
from safetensors.torch import load_file
from transformers import GenerationConfig

from rlpost.config.schema import EngineConfig
from rlpost.rollout.engine import EngineNotReady, Request, SamplingParams, TensorSpec
from rlpost.rollout.engines import build_engine
from rlpost.rollout.engines.expected import expected_tensors
from rlpost.rollout.engines.kv_cache import attention_parts, dense_attention_parts
from rlpost.rollout.engines.torch import TorchEngine
from rlpost.weights.buckets import iter_buckets, tensor_digest

PROMPTS = [[5, 9, 2, 44], [7], [5, 9, 2, 44], list(range(10, 40)), [3, 3, 8]]


def make(directory, *, max_batch=64, dtype=torch.float32, **model_fields):
    model = save_engine_model(directory, **model_fields)
    engine = TorchEngine(str(directory), dtype=dtype, max_batch=max_batch)
    engine.start()
    return model, engine


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model, engine = make(tmp_path_factory.mktemp("served"))
    load_weights(engine, model)
    return model, engine


def another(model, engine, *, max_batch):
    """An engine that serves the same."""
    other = TorchEngine(engine.config._name_or_path, dtype=torch.float32, max_batch=max_batch)
    other.start()
    load_weights(other, model)
    return other


def dense_logprobs(model, ids, temperature=1.0):
    """[len(ids) − 1, V]: row i predicts ids[i + 1]."""
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)


def ask(engine, prompts, seeds=None, **params):
    params = SamplingParams(**{"max_tokens": 12, **params})
    return engine.generate([Request(p, params, i if seeds is None else seeds[i]) for i, p in enumerate(prompts)])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("tied", [True, False])
def test_greedy_tokens_and_logprobs_are_those_of_transformers(tmp_path, family, tied):
    model, engine = make(tmp_path, family=family, tied=tied)
    load_weights(engine, model)
    assert ("lm_head.weight" in engine.expected_tensors()) is not tied
    for prompt, completion in zip(PROMPTS, ask(engine, PROMPTS, temperature=0.0)):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert completion.ids == expected[0, len(prompt) :].tolist()
        dense = dense_logprobs(model, prompt + completion.ids)[len(prompt) - 1 :]
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), dense.gather(1, torch.tensor(completion.ids)[:, None])[:, 0],
            atol=5e-6, rtol=0,
        )  # fmt: skip
        assert completion.finish_reason == "length" and completion.version == 1


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("tied", [True, False])
def test_expected_tensors_are_those_that_transformers_writes(tmp_path, family, tied):
    save_engine_model(tmp_path, family=family, tied=tied)
    written = {
        name: TensorSpec(tuple(t.shape), t.dtype) for name, t in load_file(tmp_path / "model.safetensors").items()
    }
    assert expected_tensors(str(tmp_path), torch.float32) == written
    engine = TorchEngine(str(tmp_path), dtype=torch.float32)
    engine.start()
    assert engine.expected_tensors() == written


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logprobs_are_those_at_the_sampling_temperature_before_the_cut(served, temperature):
    model, engine = served
    for prompt, completion in zip(PROMPTS, ask(engine, PROMPTS, temperature=temperature, top_k=5, top_p=0.9)):
        dense = dense_logprobs(model, prompt + completion.ids, temperature)[len(prompt) - 1 :]
        expected = [dense[i, token].item() for i, token in enumerate(completion.ids)]
        assert completion.logprobs == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("max_batch", [1, 3, 64])
def test_a_seed_gives_the_same_response_whatever_else_is_in_the_batch(served, max_batch):
    model, reference = served
    engine = another(model, reference, max_batch=max_batch)
    budgets = [1, 30, 7, 12, 3, 20, 9]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(7)]
    requests = [Request(p, SamplingParams(b), seed=i) for i, (p, b) in enumerate(zip(prompts, budgets))]
    together = engine.generate(requests)
    assert [len(c.ids) for c in together] == budgets
    for request, completion in zip(requests, together):
        assert reference.generate([request])[0].ids == completion.ids


def test_seeds_differ_and_repeat(served):
    _, engine = served
    first = ask(engine, [PROMPTS[0]] * 8, seeds=range(8))
    assert len({tuple(c.ids) for c in first}) == 8
    assert [c.ids for c in ask(engine, [PROMPTS[0]] * 8, seeds=range(8))] == [c.ids for c in first]


def test_every_eos_of_both_configurations_stops_and_is_part_of_the_response(tmp_path):
    model = save_engine_model(tmp_path, eos_token_id=[11, 12])
    GenerationConfig(eos_token_id=[12, 13]).save_pretrained(tmp_path)
    engine = TorchEngine(str(tmp_path), dtype=torch.float32)
    engine.start()
    load_weights(engine, model)
    assert engine.eos_ids == (11, 12, 13)
    completions = ask(engine, [PROMPTS[0]] * 60, max_tokens=60)
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert {c.ids[-1] for c in stopped} == {11, 12, 13}
    assert all(not {11, 12, 13} & set(c.ids[:-1]) for c in completions)
    assert all(len(c.ids) == len(c.logprobs) for c in completions)
    free = ask(engine, [PROMPTS[0]] * 60, max_tokens=60, ignore_eos=True)
    assert all(f.ids[: len(c.ids)] == c.ids and len(f.ids) == 60 for f, c in zip(free, completions))


def test_stop_tokens_of_the_request_and_one_token_responses(served):
    _, engine = served
    greedy = ask(engine, [[7]], temperature=0.0)[0]
    end = next(i for i in range(1, 12) if greedy.ids[i] not in greedy.ids[:i])
    stopped = ask(engine, [[7]], temperature=0.0, stop_token_ids=(greedy.ids[end],))[0]
    assert (stopped.ids, stopped.finish_reason) == (greedy.ids[: end + 1], "stop")
    first = ask(engine, [[7]], temperature=0.0, stop_token_ids=(greedy.ids[0],))[0]
    assert (first.ids, first.finish_reason) == (greedy.ids[:1], "stop")
    one = ask(engine, [[7], [7, 8]], temperature=0.0, max_tokens=1)
    assert [len(c.ids) for c in one] == [1, 1] and one[0].finish_reason == "length"


def test_mixed_parameters_in_one_batch(served):
    _, engine = served
    kinds = [
        SamplingParams(9, 0.0),
        SamplingParams(9, 0.8),
        SamplingParams(9, 1.0, top_k=3),
        SamplingParams(9, top_p=0.5),
    ]
    requests = [Request([4, 5], params, seed=3) for params in kinds]
    assert [c.ids for c in engine.generate(requests)] == [engine.generate([r])[0].ids for r in requests]


def test_scores_are_dense_log_softmax(served):
    model, engine = served
    sequences = [[5, 9, 2, 44, 17, 3], [7, 8], list(range(20, 60)), [1, 2, 3]]
    starts = [4, 1, 13, 3]
    for ids, start, score in zip(sequences, starts, engine.score(sequences, starts, top_k=5, temperature=0.7)):
        dense = dense_logprobs(model, ids, 0.7)[start - 1 :]
        expected = dense.gather(1, torch.tensor(ids[start:], dtype=torch.long)[:, None])[:, 0]
        torch.testing.assert_close(score.logprobs, expected, atol=5e-6, rtol=0)
        top, top_ids = dense.topk(5, dim=-1)
        torch.testing.assert_close(score.topk_logprobs, top, atol=5e-6, rtol=0)
        assert torch.equal(score.topk_ids, top_ids)
    assert engine.score([[7, 8]], [1])[0].topk_ids is None
    with pytest.raises(ValueError, match="start 0 of sequence 0"):
        engine.score([[7, 8]], [0])


def test_scores_do_not_depend_on_chunks(served, monkeypatch):
    _, engine = served
    sequences, starts = [[i + 1, *range(3, 20)] for i in range(6)], [2] * 6
    whole = engine.score(sequences, starts, top_k=3)
    monkeypatch.setattr("rlpost.rollout.engines.torch.LOGITS_CHUNK", 7 * VOCABULARY)
    monkeypatch.setattr("rlpost.rollout.engines.torch.SCORE_TOKENS", 40)
    for a, b in zip(whole, engine.score(sequences, starts, top_k=3)):
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=2e-6, rtol=0)
        assert torch.equal(a.topk_ids, b.topk_ids)


def test_prefills_in_several_pieces_change_nothing(served, monkeypatch):
    _, engine = served
    whole = ask(engine, PROMPTS)
    monkeypatch.setattr("rlpost.rollout.engines.decode.PREFILL_TOKENS", 20)
    assert [c.ids for c in ask(engine, PROMPTS)] == [c.ids for c in whole]


@pytest.mark.parametrize("max_batch", [2, 5, 64])
def test_rows_of_one_prompt_come_and_go_at_different_times(served, max_batch):
    """Prompts are kept once for their rows, leave with the last of them, and make room for others."""
    model, reference = served
    engine = another(model, reference, max_batch=max_batch)
    budgets = [(1, 30, 2), (25, 1, 1), (3, 3, 40), (2,), (12, 1, 7)]
    requests = [
        Request(prompt, SamplingParams(budget, ignore_eos=True), seed=10 * p + i)
        for p, (prompt, group) in enumerate(zip(PROMPTS, budgets))
        for i, budget in enumerate(group)
    ]
    for request, completion in zip(requests, engine.generate(requests)):
        assert len(completion.ids) == request.params.max_tokens
        dense = dense_logprobs(model, [*request.prompt_ids, *completion.ids])[len(request.prompt_ids) - 1 :]
        expected = dense.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=5e-6)


def test_attention_in_two_parts_is_the_same_on_any_device():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 7, 16), torch.randn(2, 3, 7, 16)
    mask = torch.zeros(2, 1, 1, 7)
    mask[0, ..., 5:] = float("-inf")
    for one, other in zip(*(f(query, key, value, mask, 0.3) for f in (attention_parts, dense_attention_parts))):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_what_memory_holds_by_chance_is_never_seen(served):
    _, engine = served
    requests = [Request(p, SamplingParams(b), seed=i) for i, (p, b) in enumerate(zip(PROMPTS, (3, 60, 9, 2, 40)))]
    expected = engine.generate(requests)
    torch.use_deterministic_algorithms(True)  # torch.empty then gives NaN
    try:
        assert torch.empty(3).isnan().all()
        found = engine.generate(requests)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [c.ids for c in found] == [c.ids for c in expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_low_precision_serves_what_was_published_in_it(tmp_path, family, dtype):
    model, engine = make(tmp_path, dtype=dtype, family=family)
    load_weights(engine, model)
    completion = ask(engine, [[5, 9, 2]], temperature=0.0)[0]
    score = engine.score([[5, 9, 2, *completion.ids]], [3])[0]
    assert completion.logprobs == pytest.approx(score.logprobs.tolist(), abs=0.05)
    expected = {name: tensor_digest(tensor.to(dtype)) for name, tensor in hf_tensors(model)}
    assert engine.digest() == expected


def test_refuses_to_serve_before_the_first_commit_and_after_a_partial_publish(tmp_path):
    model, engine = make(tmp_path)
    with pytest.raises(EngineNotReady, match="nothing was published yet"):
        ask(engine, [[1]])
    tensors = list(hf_tensors(model))
    engine.pause()
    for bucket in iter_buckets(iter(tensors[:-1]), 1 << 20, lambda name: torch.float32):
        engine.load_bucket(bucket)
    with pytest.raises(EngineNotReady, match=f"1 of {len(tensors)} tensors have not arrived.*{tensors[-1][0]}"):
        engine.flush()
    with pytest.raises(EngineNotReady, match="flush"):
        engine.commit(1)
    with pytest.raises(EngineNotReady, match="nothing was published yet"):
        engine.score([[1, 2]], [1])
    load_weights(engine, model, version=4)
    assert engine.version == 4 and ask(engine, [[1]])[0].version == 4
    engine.pause()
    with pytest.raises(EngineNotReady, match="given up by pause"):
        ask(engine, [[1]])


def test_a_bucket_that_does_not_fit_is_refused_whole(tmp_path):
    model, engine = make(tmp_path)
    load_weights(engine, model)
    engine.pause()
    good = torch.zeros(32)
    wrong = {
        "is not a tensor of this model": ("model.norm.wait", torch.zeros(32)),
        r"is torch.float32 \[33\], expected torch.float32 \[32\]": ("model.norm.weight", torch.zeros(33)),
        "is torch.float64": ("model.norm.weight", torch.zeros(32, dtype=torch.float64)),
    }
    for message, (name, tensor) in wrong.items():
        fitting = "model.layers.0.input_layernorm.weight"
        named = {fitting: good, name: tensor}
        bucket = next(iter_buckets(named.items(), 4096, lambda name, named=named: named[name].dtype))
        before = engine._weights[fitting].clone()
        with pytest.raises(ValueError, match=message):
            engine.load_bucket(bucket)
        assert torch.equal(engine._weights[fitting], before)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_sleeping_by_tag(tmp_path, family):
    model, engine = make(tmp_path, family=family)
    load_weights(engine, model)
    before = ask(engine, PROMPTS)
    engine.sleep(["kv_cache"])
    with pytest.raises(EngineNotReady, match="generate: kv_cache asleep"):
        ask(engine, PROMPTS)
    assert len(engine.score([[1, 2]], [1])) == 1
    engine.wake(["kv_cache"])
    assert [c.ids for c in ask(engine, PROMPTS)] == [c.ids for c in before]

    engine.sleep(["weights", "kv_cache"])
    assert sum(p.untyped_storage().nbytes() for p in engine._model.parameters()) == 0
    with pytest.raises(EngineNotReady, match="weights are asleep"):
        load_weights(engine, model)
    with pytest.raises(EngineNotReady, match="weights is asleep already"):
        engine.sleep(["weights"])
    engine.wake(["weights"])
    engine.wake(["kv_cache"])
    with pytest.raises(EngineNotReady, match="does not serve before the next commit"):
        ask(engine, PROMPTS)
    load_weights(engine, model, version=2)
    assert [c.ids for c in ask(engine, PROMPTS)] == [c.ids for c in before]
    with pytest.raises(ValueError, match="engine tag 'wieghts'"):
        engine.sleep(["wieghts"])


def test_abort_returns_the_tokens_so_far(served):
    _, engine = served
    started = threading.Event()
    hook = engine._model.base_model.register_forward_hook(lambda *_: started.set())
    found = []
    requests = [Request([i + 1], SamplingParams(200), i) for i in range(64)]
    thread = threading.Thread(target=lambda: found.extend(engine.generate(requests)))
    thread.start()
    started.wait(10)
    engine.abort()
    thread.join(10)
    hook.remove()
    assert len(found) == 64 and any(c.finish_reason == "abort" for c in found)
    whole = engine.generate(requests)
    for aborted, complete in zip(found, whole):
        assert aborted.ids == complete.ids[: len(aborted.ids)] and len(aborted.logprobs) == len(aborted.ids)


def test_a_new_publish_changes_the_answers(tmp_path):
    model, engine = make(tmp_path)
    load_weights(engine, model, 1)
    old = ask(engine, PROMPTS)
    other, fresh = make(tmp_path / "other", seed=1)
    load_weights(fresh, other, 1)
    load_weights(engine, other, 2)
    assert [c.ids for c in ask(engine, PROMPTS)] == [c.ids for c in ask(fresh, PROMPTS)] != [c.ids for c in old]


def test_mistakes_are_named(tmp_path, served):
    _, engine = served
    with pytest.raises(ValueError, match="request 0: the prompt is empty"):
        ask(engine, [[]])
    with pytest.raises(ValueError, match="exceed the model's 256 positions"):
        ask(engine, [[1] * 250])
    with pytest.raises(ValueError, match=r"top_p=1.5"):
        SamplingParams(4, top_p=1.5)
    with pytest.raises(ValueError, match="one of torch, sglang"):
        build_engine(EngineConfig(name="vllm"), "nowhere", dtype=torch.float32)
    assert engine.generate([]) == []
    save_engine_model(tmp_path, "qwen2", use_sliding_window=True, max_window_layers=1, sliding_window=4)
    with pytest.raises(ValueError, match="sliding_attention"):
        TorchEngine(str(tmp_path), dtype=torch.float32)
    cold = build_engine(EngineConfig(), engine.config._name_or_path, dtype=torch.float32)
    with pytest.raises(EngineNotReady, match=r"call start\(\) first"):
        ask(cold, [[1]])


def test_a_model_with_broken_weights_is_an_error_not_a_nan(tmp_path):
    model, engine = make(tmp_path)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    load_weights(engine, model)
    with pytest.raises(FloatingPointError, match="version 1"):
        ask(engine, [[1]])
