"""Every recipe on real data runs a step between two evaluations: a tiny model, rows in the form of SciKnowEval."""

import json

import pytest
from small_recipes import small_top_k
from tiny_policy import tiny_model
from tiny_tokenizer import tiny_tokenizer

from rlpost.__main__ import main
from rlpost.config.compose import recipe_names
from rlpost.observe.metrics import read_metrics

NAMES = [name for name in recipe_names() if "sciknoweval" in name and "url" not in name]
SMALL = [
    "trainer.steps=1",
    "trainer.eval_every=1",
    "trainer.plots=false",
    "tracker.tensorboard=false",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.max_response_tokens=40",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("real")
    tokenizer = tiny_tokenizer()
    for name in ("model", "teacher"):
        tiny_model(root / name, vocab_size=len(tokenizer))
        tokenizer.save_pretrained(root / name)
    for domain in ("biology", "physics"):
        for split in ("train", "test"):
            path = root / "data" / "sciknoweval" / domain / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [
                {
                    "idx": i,
                    "kind": "mcq",
                    "answer": "ABCD"[i % 4],
                    "system": "Answer with <answer>…</answer>.",
                    "prompt": f"Which of {domain} is number {i}?\n\nA: one\nB: two\nC: three\nD: four\n",
                }
                for i in range(6)
            ]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.mark.parametrize("name", NAMES)
def test_one_step(name, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL_DIR", str(folder / "model"))
    monkeypatch.setenv("DATA_DIR", str(folder / "data"))
    for variable in ("TEACHER_DIR", "TEACHER_BIOLOGY", "TEACHER_PHYSICS"):
        monkeypatch.setenv(variable, str(folder / "teacher"))
    more = [*small_top_k(name), *(["engine.name=torch"] if name.endswith("_gpu") else [])]
    assert main([f"recipe={name}", f"run.dir={tmp_path}", "run.name=run", *SMALL, *more]) == 0
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "eval/test/mean@1" in row] == [0, 1]
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()
