"""SGLang on a GPU: publishing by CUDA IPC, memory given back in sleep, the canary. Prints what it measures (`-s`).

RLPOST_GPU_MODEL names a model directory; without it a small Qwen3 with random weights is made.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from rlpost.rollout.engine import EngineNotReady, Request, SamplingParams
from rlpost.rollout.engines.sglang import SGLangEngine
from rlpost.rollout.engines.sglang_process import EngineDied
from rlpost.weights.buckets import iter_buckets, tensor_digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]

DTYPE = torch.bfloat16
PROMPTS = [[5, 9, 200, 31], [7] * 100, list(range(100, 190)), [3, 1, 4, 1, 5]]
ALL = ["kv_cache", "weights", "cuda_graph"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    if given := os.environ.get("RLPOST_GPU_MODEL"):
        return given
    path = tmp_path_factory.mktemp("model")
    Qwen3Config(
        vocab_size=4090,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        bos_token_id=1,
        eos_token_id=2,
    ).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def model(model_path) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_path)
    if any(Path(model_path).glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(model_path, dtype=DTYPE).cuda().eval()
    return AutoModelForCausalLM.from_config(config, dtype=DTYPE).cuda().eval()


@pytest.fixture(scope="module")
def engine(model_path) -> Iterator[SGLangEngine]:
    engine = SGLangEngine(model_path, dtype=DTYPE, memory_fraction=0.3, max_batch=64)
    began = time.monotonic()
    engine.start()
    print(f"\nstart {time.monotonic() - began:.1f} s")
    yield engine
    engine.close()


def publish(engine: SGLangEngine, model: torch.nn.Module, version: int, bucket_bytes: int = 2**28) -> float:
    torch.cuda.synchronize()
    began = time.monotonic()
    engine.pause()
    for bucket in iter_buckets(model.named_parameters(), bucket_bytes, lambda name: DTYPE):
        engine.load_bucket(bucket)
    engine.flush()
    engine.commit(version)
    return time.monotonic() - began


@torch.no_grad()
def gap(engine: SGLangEngine, model: torch.nn.Module, temperature: float = 1.0) -> tuple[float, float]:
    """Mean and largest |Δ log-prob| of sampled tokens, engine against Transformers."""
    params = SamplingParams(64, temperature, ignore_eos=True)
    completions = engine.generate([Request(prompt, params, seed=i) for i, prompt in enumerate(PROMPTS)])
    gaps = []
    for prompt, completion in zip(PROMPTS, completions):
        assert completion.version == engine.version
        logits = model(torch.tensor([prompt + completion.ids]).cuda()).logits[0, len(prompt) - 1 : -1].float()
        rows = (logits / temperature).log_softmax(-1).cpu()
        gaps.append((rows[torch.arange(len(rows)), completion.ids] - torch.tensor(completion.logprobs)).abs())
    flat = torch.cat(gaps)
    return flat.mean().item(), flat.max().item()


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def test_published_weights_answer_as_the_trainer_does(engine, model):
    print(f"first publish {publish(engine, model, 1):.3f} s")
    assert engine.transport == "auto", "CUDA IPC was refused"
    assert engine.digest() == {name: tensor_digest(parameter) for name, parameter in model.named_parameters()}
    for temperature in (1.0, 0.7):
        mean, largest = gap(engine, model, temperature)
        print(f"temperature {temperature}: |Δ log-prob| mean {mean:.4f}, max {largest:.4f}")
        assert mean < 0.02
    [score] = engine.score([PROMPTS[2]], [1], top_k=5)
    with torch.no_grad():
        rows = model(torch.tensor([PROMPTS[2]]).cuda()).logits[0, :-1].float().log_softmax(-1).cpu()
    assert (rows[torch.arange(len(rows)), PROMPTS[2][1:]] - score.logprobs).abs().mean() < 0.02


def test_sleep_gives_memory_back_and_woken_weights_want_a_publish(engine, model):
    publish(engine, model, 2)
    before = free_bytes()
    began = time.monotonic()
    engine.sleep(ALL)
    asleep = time.monotonic() - began
    given = free_bytes() - before
    assert given > 2**30, f"{given} bytes given back"
    began = time.monotonic()
    engine.wake(["weights"])
    with pytest.raises(EngineNotReady):
        engine.generate([Request(PROMPTS[0], SamplingParams(1), 0)])
    publish(engine, model, 3)
    engine.wake(["kv_cache", "cuda_graph"])
    print(
        f"sleep {asleep:.3f} s, {given / 2**30:.1f} GiB given back; wake and publish {time.monotonic() - began:.3f} s"
    )
    assert gap(engine, model)[0] < 0.02


def test_fifty_publishes_leave_device_memory_flat(engine, model):
    publish(engine, model, 10)
    before = free_bytes()
    seconds = [publish(engine, model, 11 + i) for i in range(50)]
    print(f"publish median {sorted(seconds)[25]:.4f} s, max {max(seconds):.4f} s")
    assert before - free_bytes() < 64 * 2**20


def test_host_memory_serves_where_ipc_is_refused(engine, model):
    engine.transport = "host"
    print(f"publish through host memory {publish(engine, model, 100):.3f} s")
    engine.transport = "auto"
    assert gap(engine, model)[0] < 0.02


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_engine_over_two_gpus(model_path):
    program = Path(__file__).parent / "sglang_tp.py"
    result = run_ranks([str(program), model_path], ranks=2, timeout=500)
    print(result.stdout[-2000:])
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]


def test_a_killed_engine_is_noticed_and_leaves_no_memory_behind(engine, model):
    import psutil

    publish(engine, model, 200)
    children = psutil.Process(engine._process.pid).children(recursive=True)
    os.kill(max(children, key=lambda child: child.memory_info().rss).pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDied, match="its last lines"):
        while time.monotonic() < began + 10:
            engine.generate([Request(PROMPTS[0], SamplingParams(256, ignore_eos=True), 0)] * 32)
    print(f"noticed after {time.monotonic() - began:.1f} s")
