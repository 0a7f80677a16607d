"""PPO from the command line: the critic's first steps alone, and a resumed run to the last bit."""

from pathlib import Path

import torch
from launch import run_python
from overrides import command

from rlpost.observe.metrics import read_metrics
from rlpost.weights.checkpoint import CheckpointStore

ENV = {"PYTHONPATH": f"{Path(__file__).parents[2] / 'src'}:{Path(__file__).parent}"}
MORE = ("critic.alone_steps=1", "train.updates_per_rollout=2")


def train(tiny, out, *more):
    run = run_python(["-m", "rlpost", *command(tiny, out, "ppo", *MORE, *more)], env=ENV)
    assert run.returncode == 0, run.stderr
    return [
        {k: v for k, v in row.items() if not k.startswith("perf/") and k != "publish/seconds"}
        for row in read_metrics(out / "run")
    ]


def tensors(out):
    checkpoint = CheckpointStore(out / "run" / "checkpoints").load()
    return {kind: checkpoint.tensors(kind) for kind in checkpoint.kinds}


def test_three_steps_and_three_more_are_six(tiny, tmp_path):
    whole = train(tiny, tmp_path / "whole", "trainer.steps=6")
    train(tiny, tmp_path / "half", "trainer.steps=3")
    assert train(tiny, tmp_path / "half", "trainer.steps=6") == whole

    assert "train/loss" not in whole[0] and whole[0]["critic/loss"] > 0  # the critic alone
    assert all("train/loss" in row and "critic/explained_variance" in row for row in whole[1:])

    one, other = tensors(tmp_path / "whole"), tensors(tmp_path / "half")
    assert {"critic.master", "critic.exp_avg", "critic.exp_avg_sq"} <= one.keys() == other.keys()
    for kind, saved in one.items():
        assert all(torch.equal(saved[name], other[kind][name]) for name in saved)
    assert set(one["critic.master"]) - set(one["master"]) == {"score.weight", "score.bias"}
