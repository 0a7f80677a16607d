"""A command-line run in fp16: its first steps overflow until the loss scale fits, and a loss that is NaN ends it."""

import re
from pathlib import Path

import pytest
from overrides import command
from safetensors.torch import load_file
from torch import float16

from rlpost.__main__ import main
from rlpost.observe.metrics import read_metrics

FP16 = ["model.dtype=fp16", "train.max_skipped=1", "optim.initial_loss_scale=1073741824"]


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_overflows_lower_the_scale_and_are_no_poison_and_a_resume_goes_on(tiny, tmp_path):
    arguments = command(tiny, tmp_path, "sdpo", *FP16)
    assert main([*arguments, "trainer.steps=5"]) == 0
    assert main([*arguments, "trainer.steps=24"]) == 0
    rows = [row for row in read_metrics(tmp_path / "run") if "train/loss" in row]
    skipped = [row["train/skipped"] for row in rows]
    assert skipped[:5] == [1.0] * 5 and skipped.count(0.0) > 5
    scale = 2.0**30
    for row in rows:
        assert row["train/loss_scale"] == scale
        scale /= 2 if row["train/skipped"] else 1
    assert all(("publish/version" in row) == (row["train/skipped"] == 0) for row in rows)
    assert rows[-1]["policy/logprob_diff"] < 2e-3  # the engine serves fp16, too
    exported = load_file(next((tmp_path / "run" / "export").glob("*.safetensors")))
    assert {tensor.dtype for tensor in exported.values()} == {float16}


def test_a_loss_that_is_not_finite_is_poison_at_any_scale(tiny, tmp_path, capfd):
    more = [*FP16, "algorithm.policy_loss=toy_faults.nan_loss", "train.updates_per_rollout=1", "trainer.steps=9"]
    assert main(command(tiny, tmp_path, "grpo", *more)) == 1
    said = (
        r"step 1: 2 optimizer steps in a row had gradients that are not finite .*; fp16 holds no activation above 65504"
    )
    assert re.search(said, capfd.readouterr().err)
