"""Every recipe composes, and passes the checks before anything is loaded."""

import json
from pathlib import Path

import pytest
from small_recipes import small_top_k

from rlpost.config.checks import check_config
from rlpost.config.compose import ConfigError, files_root, load_config, recipe_names
from rlpost.quickstart.task import model_config

NAMES = recipe_names()
WORLD = ("model", "teacher", "sft/export", "tiny_grpo/export", "tiny_rloo/export")
WORLD += ("grpo_sciknoweval_biology/export", "grpo_sciknoweval_physics/export")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What recipes need, as far as it is looked at before models load: configurations, and files that exist."""
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("recipes")
    for name in WORLD:
        model_config().save_pretrained(root / name)
        save_file({}, root / name / "model.safetensors")
    rows = [
        f"data/sciknoweval/{domain}/{split}.jsonl" for domain in ("biology", "physics") for split in ("train", "test")
    ]
    for name in (*rows, "data/train.jsonl", "data/eval.jsonl", "data/sft.jsonl"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps({"prompt": "?", "answer": "A"}) + "\n")
    return root


@pytest.mark.parametrize("name", NAMES)
def test_recipe(name, folder, monkeypatch):
    for variable in ("MODEL_DIR", "DATA_DIR", "TEACHER_DIR", "TEACHER_URL", "TEACHER_BIOLOGY", "TEACHER_PHYSICS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("EXP_DIR", str(folder))
    top_k = [] if "tiny" in name or "quickstart" in name else small_top_k(name)
    check_config(load_config(name, [f"run.dir={folder}", *top_k]))


def test_every_recipe_stands_in_the_table():
    table = (files_root() / "recipes" / "README.md").read_text()
    assert set(NAMES) == {path.stem for path in (Path(files_root()) / "recipes").glob("*.yaml")}
    assert not [name for name in NAMES if f"`{name}`" not in table]


def test_an_engine_takes_as_many_gpus_as_ranks_and_heads_allow(folder, monkeypatch):
    monkeypatch.setenv("EXP_DIR", str(folder))
    check_config(load_config("grpo_sciknoweval_gpu", ["engine.tensor_parallel=2", "parallel.tensor=2"]), ranks=2)
    with pytest.raises(ConfigError) as error:
        check_config(load_config("grpo_sciknoweval_gpu", ["engine.tensor_parallel=3"]), ranks=4)
    assert "engine.tensor_parallel=3 does not divide the 4 ranks" in str(error.value)
    assert f"does not divide the model's {model_config().num_attention_heads} attention heads" in str(error.value)
