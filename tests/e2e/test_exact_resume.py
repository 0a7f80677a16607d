"""Three and three steps are six, to the last bit: weights, moments, EMA, random states, metrics, prompts, tokens."""

import json
from pathlib import Path

import pytest
from launch import run_python, run_ranks
from overrides import command

from rlpost.observe.metrics import read_metrics

PROGRAM = Path(__file__).with_name("resumed_run.py")


@pytest.mark.parametrize(("algorithm", "ranks"), [("sdpo", 1), ("grpo", 2), ("ppo", 1)])
def test_three_and_three_steps_are_six(algorithm, ranks, tiny, tmp_path):
    overrides = command(tiny, tmp_path, algorithm, "tracker.progress=false")
    arguments = [str(PROGRAM), str(tmp_path), *overrides]
    run = run_python(arguments) if ranks == 1 else run_ranks(arguments, ranks, timeout=300)
    assert run.returncode == 0, run.stderr
    whole, halves = tmp_path / "whole", tmp_path / "halves"

    lines = [json.loads(line) for line in (whole / "tokens.jsonl").read_text().splitlines()]
    assert [step for step, _ in lines] == [1, 2, 3, 4, 5, 6] and all(len(samples) == 15 for _, samples in lines)
    assert (halves / "tokens.jsonl").read_text() == (whole / "tokens.jsonl").read_text()
    assert len(learned(whole)) == 6 and learned(halves) == learned(whole)

    log = (halves / "run" / "log.txt").read_text()
    assert "resumed with trainer.steps=6 (was 3)" in log and log.count("resumed with") == 1
    provider = json.loads((whole / "run" / "provider.json").read_text())["transformer_config"]
    assert (provider["num_layers"], provider["params_dtype"]) == (2, "torch.float32")

    manifests = [manifest(folder, 6) for folder in (whole, halves)]
    kinds = {"sdpo": {"tag.teacher"}, "grpo": {"tag.reference"}, "ppo": {"critic.master", "critic.exp_avg"}}
    assert {"master", "exp_avg", "exp_avg_sq"} | kinds[algorithm] <= manifests[0]["tensors"].keys()
    assert manifests[0]["files"] == manifests[1]["files"]  # sizes and checksums
    assert manifest(whole, 3)["files"] == manifest(halves, 3)["files"] != manifests[0]["files"]


def learned(folder):
    """The metrics of the steps that do not depend on the clock."""
    rows = [row for row in read_metrics(folder / "run") if "train/loss" in row]
    return [{k: v for k, v in row.items() if not k.startswith("perf/") and k != "publish/seconds"} for row in rows]


def manifest(folder, step):
    return json.loads((folder / "run" / "checkpoints" / f"step_{step:06d}" / "manifest.json").read_text())
