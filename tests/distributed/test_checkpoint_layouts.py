"""Saved by two data-parallel ranks: failures that one rank has, exact resume, and loading under other layouts."""

from pathlib import Path

import pytest
from launch import run_python, run_ranks
from tiny_policy import tiny_model

PROGRAM = str(Path(__file__).with_name("checkpoint_ranks.py"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny_model(directory / "model")
    return directory, run_ranks([PROGRAM, "save", str(directory / "model"), str(directory)], 2, timeout=150)


def test_two_ranks_save_resume_and_fail_alike(saved):
    """Teacher hashes and one further step are equal after resuming; a lone failure inside a swap blocks nobody."""
    directory, run = saved
    assert run.returncode == 0, run.stderr[-4000:]
    assert "rank 0 done" in run.stdout and "rank 1 done" in run.stdout
    names = {path.name for path in (directory / "checkpoints" / "step_000002").iterdir()}
    assert {"rank_00000.json", "rank_00001.json", "master-00001.safetensors"} <= names


def test_a_full_disk_on_one_rank_is_the_same_error_on_all(saved):
    # Counted in the text: lines of two ranks may run into each other.
    for step in (3, 4):  # written by the trainer, and in the background
        assert saved[1].stdout.count(f"step_00000{step}: rank 1: [Errno 28] No space left on device") == 2


def test_a_damaged_file_is_refused_by_all_ranks(saved):
    assert saved[1].stdout.count("master-00000.safetensors has another checksum") == 2


@pytest.mark.parametrize(("ranks", "tensor"), [(1, 1), (2, 2)])
def test_other_layouts_load_masters_moments_and_teacher_bit_for_bit(saved, ranks, tensor):
    directory, saving = saved
    assert saving.returncode == 0, saving.stderr[-4000:]
    command = [PROGRAM, "load", str(directory / "model"), str(directory), str(tensor)]
    run = run_python(command, timeout=120) if ranks == 1 else run_ranks(command, ranks, timeout=150)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count(f"of {ranks} done") == ranks
