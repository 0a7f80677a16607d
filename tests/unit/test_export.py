import json

import pytest
import torch
from tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from rlpost.weights.export import ExportError, model_card, save_pretrained

CARD = {"recipe": "quickstart_sdpo", "data": ["train.jsonl"], "steps": 3, "curve": [(1, 0.25), (2, 0.5)]}


def build(directory, *, tied, dtype=torch.float32):
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    model = Qwen3ForCausalLM(config).to(dtype).eval()
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    model.save_pretrained(directory)
    return model, tokenizer


def stream(model):
    """What a policy yields: every tensor once, a tied head under the embedding's name alone."""
    seen = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor.detach()


def logprobs(model):
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        return model(ids).logits.float().log_softmax(-1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [10**9, 5000])
def test_transformers_loads_the_same_log_probs(tmp_path, tied, shard_bytes):
    model, tokenizer = build(tmp_path / "source", tied=tied)
    for parameter in model.parameters():  # not the source's weights any more
        parameter.data.mul_(1.5)
    out = save_pretrained(
        tmp_path / "run" / "export", stream(model), tmp_path / "source", tokenizer, torch.float32, card=CARD,
        shard_bytes=shard_bytes,
    )  # fmt: skip
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.dtype == torch.float32
    assert torch.equal(logprobs(loaded.eval()), logprobs(model))
    assert loaded.generation_config.temperature == 0.7
    files = sorted(path.name for path in out.glob("*.safetensors"))
    if shard_bytes > 10**6:
        assert files == ["model.safetensors"]
    else:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in stream(model))
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"


def test_dtype_is_written_and_declared(tmp_path):
    model, tokenizer = build(tmp_path / "source", tied=True)
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")  # as older Transformers wrote it
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    out = save_pretrained(tmp_path / "x", stream(model), tmp_path / "source", tokenizer, torch.bfloat16, card={})
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert "torch_dtype" not in json.loads((out / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight.bfloat16())


def test_tokenizer_and_chat_template_come_along(tmp_path):
    model, tokenizer = build(tmp_path / "source", tied=True)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    out = save_pretrained(tmp_path / "x", stream(model), tmp_path / "source", tokenizer, torch.float32, card=CARD)
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    messages = [{"role": "user", "content": "a b"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "<user>a b"


def test_an_older_export_is_replaced_and_anything_else_is_not(tmp_path):
    model, tokenizer = build(tmp_path / "source", tied=True)
    arguments = (tmp_path / "source", tokenizer, torch.float32)
    out = save_pretrained(tmp_path / "x", stream(model), *arguments, card={}, shard_bytes=5000)
    save_pretrained(out, stream(model), *arguments, card={})
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
    assert not (out / "model.safetensors.index.json").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("dear")
    with pytest.raises(ExportError, match="home is not empty and no export"):
        save_pretrained(tmp_path / "home", stream(model), *arguments, card={})
    assert (tmp_path / "home" / "thesis.tex").read_text() == "dear"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "source", "x"]


def test_a_failure_leaves_the_older_export(tmp_path):
    model, tokenizer = build(tmp_path / "source", tied=True)
    out = save_pretrained(tmp_path / "x", stream(model), tmp_path / "source", tokenizer, torch.float32, card=CARD)
    with pytest.raises(ExportError, match=r"config\.json"):
        save_pretrained(out, stream(model), tmp_path / "absent", tokenizer, torch.float32, card={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "x"]
    assert "quickstart_sdpo" in (out / "README.md").read_text()


def test_model_card_tells_recipe_data_curve_and_versions():
    card = model_card(CARD | {"metrics": {"eval/x/mean@4": 0.123456, "train/loss": 2.0}}, base_model="Qwen3-0.6B")
    for line in (
        'base_model: "Qwen3-0.6B"',
        "# quickstart_sdpo",
        "| data | train.jsonl |",
        "| steps | 3 |",
        "| 2 | 0.5 |",
        "| eval/x/mean@4 | 0.1235 |",
        f"| torch | {torch.__version__} |",
    ):
        assert line in card.splitlines(), line
    long = model_card({"curve": [(i, float(i)) for i in range(1, 101)]}, base_model="m").splitlines()
    assert "| 1 | 1 |" in long and "| 100 | 100 |" in long and len(long) < 60
