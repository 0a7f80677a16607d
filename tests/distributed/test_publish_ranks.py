"""A publish that fails on one rank fails on all, changes no version, and can be repeated."""

from pathlib import Path

from launch import run_ranks

WORKER = str(Path(__file__).with_name("publish_worker.py"))


def test_all_ranks_commit_or_none(tmp_path):
    run = run_ranks([WORKER, str(tmp_path)], 2, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    for what in ("send the weights", "send the weights", "commit the weights"):
        assert f"could not {what} of version 2" in run.stdout
    for method in ("load_bucket", "flush", "commit"):
        for rank in (0, 1):
            assert f"rank {rank} raised: rank 1 could not" in run.stdout
            assert (
                sum(f"rank {rank} raised" in x and f"OSError: {method} broke" in x for x in run.stdout.split("\n")) == 1
            )
    for rank in (0, 1):
        assert f"rank {rank} recovered at version 2" in run.stdout
