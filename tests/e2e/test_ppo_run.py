"""PPO from the command line: in its first steps the critic learns alone."""

import torch
from launch import run_python
from overrides import command
from safetensors.torch import load_file

from rlpost.observe.metrics import read_metrics
from rlpost.weights.checkpoint import CheckpointStore


def test_the_critic_begins_alone(tiny, tmp_path):
    more = ["critic.alone_steps=1", "train.updates_per_rollout=2", "trainer.save_every=1"]
    run = run_python(["-m", "rlpost", *command(tiny, tmp_path, "ppo", *more)])
    assert run.returncode == 0, run.stderr
    first, second = (row for row in read_metrics(tmp_path / "run") if "critic/loss" in row)
    assert "train/loss" not in first and "train/loss" in second
    assert first["critic/grad_norm"] > 0 and "critic/explained_variance" in first

    initial = load_file(tiny / "model" / "model.safetensors")
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    checkpoints = [store.load(step) for step in (1, 2)]
    stayed, moved = (moves(checkpoint.tensors("master"), initial) for checkpoint in checkpoints)
    assert not any(stayed.values()) and all(moved.values())
    backbone = {name: tensor for name, tensor in initial.items() if name != "lm_head.weight"}
    assert all(moves(checkpoints[0].tensors("critic.master"), backbone).values())
    assert checkpoints[1].state["critic"] == {"updates": 4, "calls": 4}
    assert checkpoints[1].state["optimizer"] == {"updates": 2, "calls": 2}


def moves(now, before):
    return {name: not torch.equal(now[name], tensor) for name, tensor in before.items()}
