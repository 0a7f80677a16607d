"""Residents that leave the device between phases change nothing: weights, moments, teacher, metrics, to the bit."""

from pathlib import Path

import pytest
from launch import run_python, run_ranks
from overrides import command
from test_exact_resume import learned, manifest

PROGRAM = Path(__file__).with_name("moving_run.py")


@pytest.mark.parametrize(("algorithm", "ranks", "dtype"), [("sdpo", 1, "bf16"), ("ppo", 2, "fp32")])
def test_moving_changes_nothing(algorithm, ranks, dtype, tiny, tmp_path):
    overrides = command(
        tiny,
        tmp_path,
        algorithm,
        f"model.dtype={dtype}",
        "tracker.progress=false",
        "rollout.canary=always",
        f"+data.eval.seen={tiny / 'data' / 'eval.jsonl'}",
        "trainer.eval_every=1",
        "trainer.save_every=1",
        "trainer.steps=2",
    )
    arguments = [str(PROGRAM), str(tmp_path), *overrides]
    run = run_python(arguments) if ranks == 1 else run_ranks(arguments, ranks, timeout=300)
    assert run.returncode == 0, run.stderr
    assert ("the model's weights" in run.stdout) is (
        algorithm == "ppo"
    )  # the critic's: no phase but its own needs them
    assert "its gradients" in run.stdout and "its optimizer's state" in run.stdout
    stay, move = tmp_path / "stay", tmp_path / "move"
    assert len(learned(stay)) == 2 and learned(move) == learned(stay)
    assert all(0 <= row["rollout/canary"] < 0.1 for row in learned(stay))
    assert manifest(move, 2)["files"] == manifest(stay, 2)["files"]
