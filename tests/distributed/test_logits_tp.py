from pathlib import Path

from launch import run_ranks


def test_two_vocabulary_shards_equal_one():
    result = run_ranks([str(Path(__file__).with_name("logits_tp.py"))], 2, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("agrees") == 2
