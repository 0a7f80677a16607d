"""A run from the command line: what it leaves behind, how it goes on, how it ends when something goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from exports import distance_of_export
from launch import environment, run_python, run_ranks
from overrides import command

from rlpost.observe.metrics import read_metrics


def rlpost(*arguments, **options):
    return run_python(["-m", "rlpost", *arguments], **options)


def learned(directory):
    """The metrics that do not depend on the clock."""
    rows = read_metrics(directory)
    return [{k: v for k, v in row.items() if not k.startswith("perf/") and k != "publish/seconds"} for row in rows]


def test_a_run_leaves_everything_and_resumes_to_the_last_bit(tiny, tmp_path):
    evaluated = [f"data.eval.held_out={{path: {tiny / 'data' / 'eval.jsonl'}, limit: 8, samples: 2}}"]
    whole = command(tiny, tmp_path / "whole", "sdpo", *evaluated, "trainer.steps=4", "trainer.plots=true")
    run = rlpost(*whole, "tracker.tensorboard=true")
    assert run.returncode == 0, run.stderr
    assert "step 4/4" in run.stderr and "export" in run.stderr
    directory = tmp_path / "whole" / "run"
    for place in ("config.yaml", "log.txt", "timeline.json", "tensorboard", "checkpoints/latest", "export/README.md"):
        assert (directory / place).exists(), place
    for picture in ("reward", "loss", "teacher_distance", "response_lengths", "overview"):
        assert (directory / "plots" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    rollouts = (directory / "rollouts" / "train" / "4.jsonl").read_text().splitlines()
    assert len(rollouts) == 15 and any(json.loads(line)["teacher_prompt"] for line in rollouts)
    assert len((directory / "rollouts" / "eval" / "4.jsonl").read_text().splitlines()) == 16
    last = [row for row in read_metrics(directory) if "train/loss" in row][-1]
    for name in ("rollout/reward/mean", "sdpo/teacher_student_kl", "ema/distance", "perf/train_s", "perf/tokens_per_s"):
        assert name in last, name

    half = command(tiny, tmp_path / "half", "sdpo", *evaluated)
    assert rlpost(*half, "trainer.steps=2").returncode == 0
    again = rlpost(*half, "trainer.steps=4")
    assert again.returncode == 0, again.stderr
    trained = [[row for row in learned(d) if "train/loss" in row] for d in (directory, tmp_path / "half" / "run")]
    assert trained[0] == trained[1]


def test_rows_left_out_are_said_on_the_terminal_once_and_named_in_the_log(tiny, tmp_path):
    rows = (tiny / "data" / "train.jsonl").read_text().splitlines()
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join([rows[0], "{broken", *rows[1:], '{"prompt": 3}']))
    arguments = [*command(tiny, tmp_path, "grpo"), f"data.train={data}", "data.on_bad_row=skip", "trainer.steps=1"]
    run = run_ranks(["-m", "rlpost", *arguments, "tracker.progress=false"], 2)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count(f"warning: 2 of {len(rows) + 2} rows left out") == 1
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"left out {data}:2" in log and f"left out {data}:{len(rows) + 2}: wrong type" in log
    assert "training from step" in log and "training from step" not in run.stderr


def test_the_export_scores_as_the_trainer_does(tiny, tmp_path):
    run = rlpost(*command(tiny, tmp_path, "sdpo"))
    assert run.returncode == 0, run.stderr
    assert distance_of_export(tmp_path / "run") <= 2e-5


def test_a_failing_reward_on_one_rank_ends_all_with_one_message(tiny, tmp_path):
    more = ["reward._target_=toy_rewards.broken_on_rank_1", "reward.on_error=raise"]
    start = time.monotonic()
    run = run_ranks(["-m", "rlpost", *command(tiny, tmp_path, "grpo", *more)], 2)
    assert run.returncode != 0
    assert time.monotonic() - start < 60
    before, _, summary = run.stderr.partition("FAILED\n")
    for words in (before, summary.rpartition("Root Cause")[2]):  # torchrun's last words are the same
        assert words.count("rank 1 failed in phase 'judge' of step 0") == 1, run.stderr
        assert "the scorer divided by zero" in words
    assert "Traceback" not in run.stderr.split("rank 1 failed")[0]


def start(tiny, out, *more):
    """A long run in the background, past its first checkpoint."""
    arguments = command(tiny, out, "sdpo", "trainer.steps=100000", "trainer.save_every=2", *more)
    process = subprocess.Popen(
        [sys.executable, "-m", "rlpost", *arguments], env=environment(), stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if line.startswith("step "):
            step = int(line.split()[1].split("/")[0])
            if step >= 5:
                return process, arguments
    raise AssertionError("the run ended by itself")


def test_ctrl_c_saves_and_the_same_command_goes_on(tiny, tmp_path):
    process, arguments = start(tiny, tmp_path)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "stopped after step" in errors
    done = max(row["step"] for row in read_metrics(tmp_path / "run"))
    run = rlpost(*arguments, f"trainer.steps={done + 1}")
    assert run.returncode == 0, run.stderr
    assert f"training from step {done} to {done + 1}" in run.stderr


def test_kill_9_loses_nothing_that_was_saved(tiny, tmp_path):
    process, arguments = start(tiny, tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    latest = int((tmp_path / "run" / "checkpoints" / "latest").read_text().strip().removeprefix("step_"))
    assert latest >= 4
    run = rlpost(*arguments, f"trainer.steps={latest + 2}")
    assert run.returncode == 0, run.stderr
    steps = [row["step"] for row in read_metrics(tmp_path / "run")]
    assert steps == list(range(1, latest + 3))


def test_another_run_in_the_same_directory_is_refused(tiny, tmp_path):
    assert rlpost(*command(tiny, tmp_path, "sft", "trainer.steps=1")).returncode == 0
    run = rlpost(*command(tiny, tmp_path, "grpo"))
    assert run.returncode == 2
    assert "holds another run: " in run.stderr and "Choose another run.name" in run.stderr


@pytest.mark.parametrize(
    ("more", "counted"),
    [([], 2.0), (["rollout.filter=nonzero_std", "rollout.max_rounds=1"], 1.0)],
    ids=["two updates without a signal", "no group passes the filter"],
)
def test_equal_rewards_move_nothing(more, counted, tiny, tmp_path):
    constant = ["reward._target_=toy_rewards.constant", "algorithm.kl_loss_coef=0"]
    run = rlpost(*command(tiny, tmp_path, "grpo", *constant, *more))
    assert run.returncode == 0, run.stderr
    rows = read_metrics(tmp_path / "run")
    assert [row["train/no_signal"] for row in rows] == [counted] * 2
    assert all(row["publish/version"] == 1.0 for row in rows if "publish/version" in row)


@pytest.mark.parametrize("what", ["export", "checkpoints"])
def test_a_directory_that_cannot_be_written_is_said(what, tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / what).write_text("a file where a folder must be")
    run = rlpost(*command(tiny, tmp_path, "sft", "trainer.steps=1"))
    assert run.returncode != 0
    assert str(tmp_path / "run" / what) in run.stderr
    assert "Traceback" not in run.stderr


def test_a_guard_stops_the_run_after_a_checkpoint(tiny, tmp_path):
    more = ["guards.action=stop", "guards.window=1", "guards.min_entropy=100", "trainer.steps=3"]
    run = rlpost(*command(tiny, tmp_path, "grpo", *more))
    assert run.returncode == 0, run.stderr
    assert "step 1: policy/entropy is" in run.stderr and "below guards.min_entropy=100" in run.stderr
    assert "stopped after step 1" in run.stderr
    latest = (tmp_path / "run" / "checkpoints" / "latest").read_text()
    assert int(latest.strip().removeprefix("step_")) == 1
