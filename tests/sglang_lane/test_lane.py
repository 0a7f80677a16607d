"""Real SGLang on the CPU: control flow and numerics of the engine, nothing about GPUs.

Every test runs a program of `programs/` in a process of its own with a time limit, because a failing engine may end
its caller. Run by `make test-sglang`, in the environment that `setup_env.sh` makes.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest
from launch import run_python, run_ranks
from tiny_tokenizer import tiny_tokenizer
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang: make test-sglang"),
]

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""}
SIZES = {
    "vocab_size": 500,  # no multiple of 64: SGLang pads the embedding
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MODELS = {
    "llama, tied head": LlamaConfig(**SIZES, tie_word_embeddings=True, architectures=["LlamaForCausalLM"]),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"]),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=32, tie_word_embeddings=False, architectures=["Qwen3MoeForCausalLM"]
    ),
}


@pytest.fixture
def model_path(request, tmp_path) -> str:
    MODELS[getattr(request, "param", "llama, tied head")].save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def measured(result) -> dict[str, float]:
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    [line] = [line for line in result.stdout.splitlines() if line.startswith("MEASURED ")]
    print(line)
    return json.loads(line.removeprefix("MEASURED "))


@pytest.mark.parametrize("model_path", MODELS, indirect=True)
def test_an_engine_agrees_with_transformers_through_its_whole_life(model_path):
    figures = measured(run_python([str(PROGRAMS / "serve.py"), model_path], timeout=300, env=ENVIRONMENT))
    for name in ("greedy", "sampled", "scored", "greedy after a publish"):
        assert figures[name] < 2e-5, figures


def test_sglang_loads_an_export_and_scores_alike(model_path, tmp_path):
    program = [str(PROGRAMS / "exported.py"), model_path, str(tmp_path / "export")]
    environment = ENVIRONMENT | {"SGLANG_USE_CPU_ENGINE": "1"}
    figures = measured(run_python(program, timeout=300, env=environment))
    assert figures["shards"] > 1 and figures["gap"] < 2e-5, figures


@pytest.mark.parametrize("model_path", ["qwen3"], indirect=True)
def test_its_http_server_is_a_teacher(model_path):
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 512  # the server tells it as a 64-bit integer
    tokenizer.save_pretrained(model_path)
    program = [str(PROGRAMS / "teacher_server.py"), model_path]
    figures = measured(run_python(program, timeout=300, env=ENVIRONMENT))
    assert figures["scored"] < 2e-5 and figures["sequences"] == 4, figures


def test_a_dead_engine_is_a_clear_error_and_leaves_nothing(model_path):
    figures = measured(run_python([str(PROGRAMS / "death.py"), model_path], timeout=300, env=ENVIRONMENT))
    assert figures["noticed_s"] < 10


def test_an_engine_takes_a_process_that_imported_sglang_ahead_and_none_is_left(model_path):
    from common import alive

    figures = measured(run_python([str(PROGRAMS / "prestart.py"), model_path], timeout=300, env=ENVIRONMENT))
    assert not alive(figures["left"])


def test_two_ranks_have_an_engine_each_and_no_engine_outlives_a_killed_rank(model_path):
    from common import alive

    result = run_ranks([str(PROGRAMS / "ranks.py"), model_path], ranks=2, timeout=300, env=ENVIRONMENT)
    groups = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("GROUPS ")]
    assert groups, result.stdout[-3000:] + result.stderr[-6000:]
    assert result.returncode != 0, "the ranks end themselves by SIGKILL"
    deadline = time.monotonic() + 10
    while left := [group for group in groups[0] if alive(int(group))]:
        assert time.monotonic() < deadline, f"process groups {left} outlive their ranks"
