"""Runs of two ranks that are told to stop, or of which one rank goes wrong: words, exit code, time, disk."""

import re
import signal

import pytest
from killing import Run
from overrides import command

from rlpost.observe.metrics import read_metrics
from rlpost.weights.checkpoint import CheckpointStore

LONG = ["trainer.steps=100000", "trainer.save_every=2", "tracker.rollouts=false"]
FINISHING = "finishing the phase, then saving; once more to stop at once"


@pytest.fixture
def started(tiny, tmp_path):
    """A run of two ranks in its fourth step or later."""
    runs = []

    def start(*more, ranks=2):
        runs.append(Run(command(tiny, tmp_path, "grpo", *LONG, *more), ranks))
        assert runs[-1].wait_for(r"^step +4/"), runs[-1].text
        runs[-1].pids()
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.kill_all()


def saved(directory):
    """The steps of the checkpoint that a run left, loaded."""
    return CheckpointStore(directory / "run" / "checkpoints").load().step


def test_one_signal_to_one_rank_is_every_ranks_and_the_run_ends_well(started, tmp_path):
    run = started()
    run.kill(1, signal.SIGTERM)
    code, _ = run.end()
    assert code == 0, run.text
    (done,) = re.findall(r"stopped after step (\d+); run the same command to go on", run.text)
    assert "Traceback" not in run.text
    assert saved(tmp_path) == int(done) == max(row["step"] for row in read_metrics(tmp_path / "run"))


def test_ctrl_c_in_the_terminal_of_torchrun(started, tmp_path):
    """torchrun hands the signal on, and ends with a traceback of its own and exit code 1 whatever its ranks do."""
    run = started()
    run.process.send_signal(signal.SIGINT)
    code, _ = run.end()
    assert code == 1
    assert run.text.count(f"SIGINT: {FINISHING}") == 1
    (done,) = re.findall(r"stopped after step (\d+); run the same command to go on", run.text)
    assert saved(tmp_path) == int(done)
    assert "failed in phase" not in run.text and "FAILED" not in run.text


def test_the_second_signal_ends_a_rank_that_waits_for_a_dead_connection(started, tmp_path):
    """Where no Python code runs: rank 0 is in a collective that rank 1, stopped, will never join."""
    run = started()
    run.kill(1, signal.SIGSTOP)
    run.kill(0, signal.SIGTERM)
    assert run.wait_for(f"SIGTERM: {FINISHING}")
    run.kill(0, signal.SIGTERM)
    assert run.wait_for("stopped at once; the last checkpoint is intact", timeout=20)
    run.kill(1, signal.SIGKILL)
    code, seconds = run.end()
    assert code == 1 and seconds < 15, run.text
    assert saved(tmp_path) >= 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_to_one_process(number, started, tmp_path):
    run = started("reward._target_=toy_faults.hanging_later", "reward.timeout=600", ranks=0)
    assert run.wait_for("the reward hangs")
    run.kill(0, number)
    assert run.wait_for(f"{number.name}: {FINISHING}")
    run.kill(0, number)
    code, seconds = run.end()
    assert code == 130 and seconds < 10, run.text
    ours = [line for line in run.text.splitlines() if line.strip() and line != "the reward hangs"]  # in any thread
    assert ours[-1] == "stopped at once; the last checkpoint is intact"
    assert "Traceback" not in run.text and saved(tmp_path) >= 2


def test_a_reward_that_crashes_its_rank(started, tmp_path):
    run = started("reward._target_=toy_faults.crashing_on_rank_1")
    code, seconds = run.end()
    assert code == 1 and seconds < 15
    before, _, summary = run.text.partition("FAILED\n")
    (sentence,) = re.findall(r"rank 1 failed in phase '(\w+)' of step \d+: its process \d+ is gone", before)
    assert sentence in ("judge", "prepare")
    assert "in crashing" in before  # where it crashed, from its own C code
    assert "Signal 11 (SIGSEGV)" in summary
    assert saved(tmp_path) >= 2


def test_a_loss_that_is_not_finite_on_one_rank_moves_no_rank(tiny, tmp_path):
    more = ["teacher=ema", "trainer.steps=3", "train.updates_per_rollout=1"]
    more += ["algorithm.grpo.policy_loss=toy_faults.nan_loss_on_rank_1_once"]
    run = Run(command(tiny, tmp_path, "blend", *more), 2)
    code, _ = run.end()
    assert code == 0, run.text
    first, second, third = [row for row in read_metrics(tmp_path / "run") if "train/loss" in row]
    assert [row["train/skipped"] for row in (first, second, third)] == [0.0, 1.0, 0.0]
    assert {"train/loss", "train/grad_norm"} <= set(second["nonfinite"]) and "nonfinite" not in first
    assert second["ema/distance"] == first["ema/distance"] != third["ema/distance"]
    assert "publish/version" not in second and third["publish/version"] == first["publish/version"] + 1
