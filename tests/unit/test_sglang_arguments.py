"""What of the SGLang engine needs no SGLang: arguments, environment, advice, expected tensors."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from rlpost.rollout.engine import Bucket, SamplingParams, TensorSpec
from rlpost.rollout.engines.expected import bucket_faults, expected_tensors
from rlpost.rollout.engines.sglang_arguments import check_settings, sampling_params
from rlpost.rollout.engines.sglang_host import server_arguments
from rlpost.rollout.engines.sglang_process import advice_on, engine_environment

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_arguments_are_renamed_dropped_or_refused_by_what_the_release_knows():
    wanted = {"dtype": "float32", "cuda_graph_max_bs_decode": 8, "nccl_port": 1}
    assert server_arguments(wanted, {}, ["dtype", "cuda_graph_max_bs"], "0.4") == {
        "dtype": "float32",
        "cuda_graph_max_bs": 8,
    }
    assert server_arguments(wanted, {"dtype": "half"}, wanted, "1")["dtype"] == "half"
    with pytest.raises(ValueError, match="SGLang 1 has no argument 'dtype'"):
        server_arguments(wanted, {}, ["nccl_port"], "1")
    with pytest.raises(ValueError, match=r"engine\.extra\.dtyp: SGLang 1 has no such argument; did you mean dtype"):
        server_arguments(wanted, {"dtyp": 1}, wanted, "1")


def test_settings_are_refused_all_at_once(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin="sglang/__init__.py"))
    check_settings(torch.float32, 1, 0.5, 1, "auto")
    with pytest.raises(ValueError) as error:
        check_settings(torch.int8, 0, 1.5, 0, "mail")
    for told in ("dtype", "tensor_parallel=0", "memory_fraction=1.5", "max_batch=0", "'mail'"):
        assert told in str(error.value)


@pytest.mark.parametrize("found", [None, SimpleNamespace(origin=None)])
def test_a_missing_sglang_says_what_to_install(monkeypatch, found):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(ImportError, match=r"pip install 'rlpost\[gpu\]'"):
        check_settings(torch.float32, 1, 0.5, 1, "auto")


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_engine_sees_no_torchrun_and_finds_rlpost(on_gpu, monkeypatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    torchrun = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    for name in (*torchrun, "PYTORCH_CUDA_ALLOC_CONF", "RANKED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    found = engine_environment()
    assert not found.keys() & {*torchrun, "PYTORCH_CUDA_ALLOC_CONF"}
    assert found["RANKED"] == "1" and ("SGLANG_USE_CPU_ENGINE" in found) != on_gpu
    assert importlib.util.find_spec("rlpost").origin.startswith(found["PYTHONPATH"].split(":")[0])


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("ValueError: … leave no GPU memory for the KV cache. Raise --mem-fraction-static above 0.036", "raise engine"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "raise engine"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "lower engine.memory_fraction"),
        ("ValueError: Model architectures ['X'] are not supported for now.", "lacks this architecture"),
        ("ValueError: Cannot find model module. 'X' is not a registered model", "lacks this architecture"),
        ("all is well", None),
    ],
)
def test_known_causes_come_with_advice(output, told):
    advice = advice_on(output)
    assert advice is None if told is None else told in advice


def test_sampling_parameters():
    params = SamplingParams(5, 0.7, 0.9, 3, stop_token_ids=(4,))
    assert sampling_params(params, None) == {
        "max_new_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 3,
        "stop_token_ids": [4],
        "ignore_eos": False,
    }
    assert sampling_params(params, 2**40 + 7)["sampling_seed"] == 7


def test_expected_tensors_are_those_of_the_model_class(tmp_path):
    LlamaConfig(**SIZES, tie_word_embeddings=True).save_pretrained(tmp_path)
    expected = expected_tensors(str(tmp_path), torch.bfloat16)
    assert "lm_head.weight" not in expected
    assert expected["model.embed_tokens.weight"] == TensorSpec((40, 16), torch.bfloat16)
    wrong = [("x", TensorSpec((1,), torch.bfloat16), 0), ("model.norm.weight", TensorSpec((15,), torch.float32), 0)]
    faults = bucket_faults(Bucket(torch.empty(0), wrong), expected)
    assert "'x' is not a tensor" in faults[0] and "float32 [15], expected torch.bfloat16 [16]" in faults[1]


def test_experts_are_expected_under_their_names_in_the_checkpoint(tmp_path):
    config = Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, tie_word_embeddings=False
    )
    config.save_pretrained(tmp_path)  # that is enough: no weights are read
    expected = expected_tensors(str(tmp_path), torch.float32)
    assert expected["model.layers.0.mlp.experts.1.gate_proj.weight"].shape == (8, 16)
    assert "lm_head.weight" in expected
