"""One engine through its whole life, against Transformers. argv: model directory. Prints what was measured."""

import asyncio
import json
import subprocess
import sys
import threading
import time

import torch
from common import greedy, logprobs_of, publish, reference, running_engine

from rlpost.rollout.engine import Bucket, EngineNotReady, Request, SamplingParams, TensorSpec
from rlpost.rollout.engines.expected import disk_tensors
from rlpost.weights.buckets import iter_buckets, tensor_digest

PROMPTS = [[5, 9, 200, 31], [7] * 40, list(range(100, 120)), [5, 9, 200, 31]]


def refused(kind, function, *arguments, **keywords) -> str:
    try:
        function(*arguments, **keywords)
    except kind as error:
        return str(error)
    raise AssertionError(f"{function.__name__} was not refused")


def largest_gap(model, completions, prompts, temperature=1.0) -> float:
    gap = 0.0
    for prompt, completion in zip(prompts, completions):
        rows = logprobs_of(model, prompt + completion.ids, temperature)[len(prompt) - 1 :]
        want = rows[torch.arange(len(completion.ids)), completion.ids]
        gap = max(gap, (want - torch.tensor(completion.logprobs).double()).abs().max().item())
    return gap


def check_greedy(engine, model, version) -> float:
    completions = engine.generate(greedy(PROMPTS, 12))
    for prompt, completion in zip(PROMPTS, completions):
        ids = list(prompt)
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert completion.ids == ids[len(prompt) :], (prompt, completion)
        assert completion.finish_reason == "length" and completion.version == version
    return largest_gap(model, completions, PROMPTS)


def check_sampling(engine, model) -> float:
    gap = 0.0
    for temperature, top_p, top_k in ((0.7, 1.0, -1), (1.3, 0.8, 20)):
        params = SamplingParams(10, temperature, top_p, top_k, ignore_eos=True)
        completions = engine.generate([Request(prompt, params, seed=i) for i, prompt in enumerate(PROMPTS)])
        gap = max(gap, largest_gap(model, completions, PROMPTS, temperature))
        assert completions[0].ids != completions[3].ids, "equal prompts were sampled alike"
    return gap


def check_stop(engine) -> None:
    [free] = engine.generate(greedy(PROMPTS[:1], 12))
    stop = free.ids[4]
    params = SamplingParams(12, temperature=0.0, stop_token_ids=(stop,))
    [completion] = engine.generate([Request(PROMPTS[0], params, 0)])
    assert completion.ids == free.ids[: free.ids.index(stop) + 1] and completion.finish_reason == "stop", completion


def check_scores(engine, model) -> float:
    sequences, starts = [PROMPTS[2], PROMPTS[1], [3, 4]], [1, 30, 2]
    gap = 0.0
    for top_k in (0, 5):
        for ids, start, score in zip(sequences, starts, engine.score(sequences, starts, top_k=top_k)):
            rows = logprobs_of(model, ids)[start - 1 :]
            want = rows[torch.arange(len(rows)), ids[start:]]
            assert score.logprobs.shape == want.shape and score.version == engine.version
            if len(ids) > start:
                gap = max(gap, (want - score.logprobs).abs().max().item())
            if top_k:
                top = rows.topk(top_k, dim=-1)
                assert torch.equal(score.topk_ids, top.indices), (score.topk_ids, top.indices)
                if len(ids) > start:
                    gap = max(gap, (top.values - score.topk_logprobs).abs().max().item())
    assert "temperature=0.7" in refused(ValueError, engine.score, sequences, starts, temperature=0.7)
    return gap


def check_refusals(engine, model) -> None:
    name, spec = next(iter(engine.expected_tensors().items()))
    engine.pause()
    refused(EngineNotReady, engine.generate, greedy(PROMPTS, 1))
    for wrong_name, wrong in ((f"{name}.x", spec), (name, TensorSpec((2, 2), spec.dtype))):
        bucket = Bucket(torch.zeros(2**20, dtype=torch.uint8), [(wrong_name, wrong, 0)])
        assert wrong_name in refused(ValueError, engine.load_bucket, bucket)
    assert "have not arrived" in refused(EngineNotReady, engine.flush)
    engine.load_bucket(next(iter_buckets(disk_tensors(model), 2**16, lambda name: torch.float32)))  # and given up
    refused(EngineNotReady, engine.commit, 9)
    assert engine.version == 2


def check_that_places_are_remembered(engine, model) -> None:
    begin_hook, replayed = engine._begin_hook, []

    def watched(command, *arguments, **keywords):
        results = begin_hook(command, *arguments, **keywords)
        return results if command != "load" else lambda: replayed.extend(results())

    engine._begin_hook = watched
    publish(engine, model, 4)
    engine._begin_hook = begin_hook
    assert replayed and all(replayed), replayed
    assert engine.digest() == {name: tensor_digest(p) for name, p in disk_tensors(model)}


def check_abort(engine) -> float:
    """An abort from another thread returns the tokens so far. One that comes before the request, or between two, meets
    nothing: it is made again until it has met one."""
    start, met = time.monotonic(), threading.Event()

    def abort() -> None:
        while not met.wait(0.02):
            engine.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        while time.monotonic() < start + 60:
            [completion] = engine.generate(greedy([[11, 12, 13]], 400))
            if completion.finish_reason == "abort":
                assert len(completion.ids) == len(completion.logprobs) < 400, completion
                return time.monotonic() - start
        raise AssertionError("no abort met a request")
    finally:
        met.set()
        thread.join()


async def generate_in_a_loop(engine):
    return engine.generate(greedy(PROMPTS[:1], 2))


def main() -> None:
    path = sys.argv[1]
    measured = {}
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first, second = reference(path, seed=1), reference(path, seed=2)
    began = time.monotonic()
    with running_engine(path) as engine:
        measured["start_s"] = time.monotonic() - began
        assert set(engine.expected_tensors()) == {name for name, _ in disk_tensors(first)}
        assert "nothing was published" in refused(EngineNotReady, engine.generate, greedy(PROMPTS, 1))

        publish(engine, first, 1)
        measured["greedy"] = check_greedy(engine, first, 1)
        measured["sampled"] = check_sampling(engine, first)
        measured["scored"] = check_scores(engine, first)
        check_stop(engine)
        measured["abort_s"] = check_abort(engine)

        began = time.monotonic()
        publish(engine, second, 2, bucket_bytes=2**24)
        measured["publish_s"] = time.monotonic() - began
        measured["greedy after a publish"] = check_greedy(engine, second, 2)
        assert engine.digest() == {name: tensor_digest(p) for name, p in disk_tensors(second)}
        check_refusals(engine, second)
        publish(engine, second, 3)
        check_that_places_are_remembered(engine, first)
        publish(engine, second, 5)

        engine.sleep(["kv_cache", "weights"])
        refused(EngineNotReady, engine.generate, greedy(PROMPTS, 1))
        engine.wake(["weights"])
        refused(EngineNotReady, engine.wake, ["weights"])
        publish(engine, first, 6)
        engine.wake(["kv_cache"])
        check_greedy(engine, first, 6)
        asyncio.run(generate_in_a_loop(engine))
    assert bystander.poll() is None, "close ended another child of the caller"
    bystander.communicate(b"\n")
    print("MEASURED " + json.dumps(measured))


if __name__ == "__main__":
    main()
