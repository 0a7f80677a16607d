"""Checkpoints of several ranks: failures that one rank has, exact resume, and loading under other layouts."""

from pathlib import Path

import pytest
from launch import run_python, run_ranks
from tiny_models import save_model
from tiny_policy import tiny_model

PROGRAM = str(Path(__file__).with_name("checkpoint_ranks.py"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny_model(directory / "dense")
    save_model("qwen3-moe", directory).rename(directory / "experts")
    return directory, run_ranks([PROGRAM, "save", str(directory)], 2, timeout=150)


def test_two_ranks_save_resume_and_fail_alike(saved):
    """Teacher hashes and one further step are equal after resuming; a lone failure inside a swap blocks nobody."""
    directory, run = saved
    assert run.returncode == 0, run.stderr[-4000:]
    assert "rank 0 done" in run.stdout and "rank 1 done" in run.stdout
    names = {path.name for path in (directory / "plain" / "step_000002").iterdir()}
    assert {"rank_00000.json", "rank_00001.json", "master-00001.safetensors"} <= names


def test_a_full_disk_on_one_rank_is_the_same_error_on_all(saved):
    # Counted in the text: lines of two ranks may run into each other.
    for step in (3, 4):  # written by the trainer, and in the background
        assert saved[1].stdout.count(f"step_00000{step}: rank 1: [Errno 28] No space left on device") == 2


def test_a_damaged_file_is_refused_by_all_ranks(saved):
    assert saved[1].stdout.count("master-00000.safetensors has another checksum") == 2


@pytest.fixture(scope="module")
def cut(saved):
    """Saved by four ranks too: TP 2 × DP 2, and experts over EP 2."""
    directory, _ = saved
    run = run_ranks([PROGRAM, "cut", str(directory)], 4, timeout=200)
    assert run.returncode == 0, run.stderr[-4000:]
    return directory


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_layouts_load_masters_moments_and_teacher_bit_for_bit(cut, ranks):
    """And their next step has the same loss. Two ranks read as TP 2, PP 2, EP 2 and DP 2."""
    command = [PROGRAM, "load", str(cut)]
    run = run_python(command, timeout=120) if ranks == 1 else run_ranks(command, ranks, timeout=150)
    assert run.returncode == 0, run.stderr[-4000:]
    for name in ("plain", "tp2_dp2", "ep2_dp4"):
        assert run.stdout.count(f"of {ranks} loaded {name}") >= ranks
