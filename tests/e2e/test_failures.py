"""What a person reads when a run fails, and what is on disk then. In one process; ranks: test_failing_runs.py."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import environment
from overrides import command
from transformers import Qwen3ForCausalLM

from rlpost.__main__ import main
from rlpost.observe.metrics import read_metrics
from rlpost.quickstart import task
from rlpost.weights.checkpoint import CheckpointStore

LOSS = "algorithm.policy_loss=toy_faults."

# name: (algorithm of overrides.py, overrides, the sentence, steps done)
FAILURES = {
    "a reward raises": (
        "grpo",
        ["reward._target_=toy_faults.raising", "reward.on_error=raise"],
        r"rank 0 failed in phase 'judge' of step 0: reward 'raising' on prompt \d+, sample 0: "
        r"ZeroDivisionError: the scorer divided by zero",
        0,
    ),
    "a reward hangs": (
        "grpo",
        ["reward._target_=toy_faults.hanging", "reward.on_error=raise", "reward.timeout=0.2"],
        r"phase 'judge' of step 0: reward 'hanging' on prompt \d+, sample 0: TimeoutError: no result within 0.2 s",
        0,
    ),
    "a reward crashes in its own process": (
        "grpo",
        [
            "reward._target_=toy_faults.crashing",
            "reward.on_error=raise",
            "reward.isolate=true",
            "rollout.prompts_per_step=1",
        ],
        r"phase 'judge' of step 0: reward 'crashing' on prompt \d+, sample 0: RuntimeError: its process ended "
        r"\(signal SIGSEGV\)",
        0,
    ),
    "out of memory in the rollout": (
        "grpo",
        ["rollout.filter=toy_faults.greedy_filter"],
        r"phase 'rollout' of step 0: out of memory \(4194304 GiB more wanted; [\d.]+ \wiB used at the peak, the host "
        r"has [\d.]+ GiB; the phase holds engine.weights 330 KiB, engine.kv_cache 0 bytes, "
        r"policy.weights 330 KiB\): lower engine.max_batch, "
        r"rollout.max_response_tokens or engine.memory_fraction",
        0,
    ),
    "out of memory in training": (
        "grpo",
        [LOSS + "greedy_loss"],
        r"phase 'train' of step 0: out of memory \(.*; the phase holds policy.weights 330 KiB, policy.gradients "
        r"330 KiB, policy.optimizer 660 KiB\): lower train.max_tokens_per_micro_batch or model.head_chunk_tokens, set "
        r"train.recompute=full, or raise parallel.tensor",
        0,
    ),
    "losses that are not finite": (
        "grpo",
        [LOSS + "nan_loss", "train.max_skipped=2", "train.updates_per_rollout=1", "trainer.steps=9"],
        r"phase 'train' of step 2: 3 optimizer steps in a row had gradients that are not finite "
        r"\(train.max_skipped=2\): lower optim.lr",
        2,
    ),
}


@pytest.fixture
def fails(tiny, tmp_path, capfd, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])

    def run(algorithm, *more, model=None):
        """The sentence of a run that fails, in a second or two."""
        capfd.readouterr()
        arguments = command(tiny, tmp_path, algorithm, "trainer.save_every=1", *more)
        if model is not None:
            arguments[0] = f"model.path={model}"
        code = main(arguments)
        words = capfd.readouterr().err
        assert code == 1 and "Traceback" not in words, words
        said = words.strip().splitlines()[-2:]
        assert said[1].startswith(f"The traceback is in {tmp_path / 'run' / 'log.txt'}.")
        assert words.count(said[0]) == 1
        return said[0]

    return run


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_one_sentence(name, fails, tmp_path):
    algorithm, more, sentence, steps = FAILURES[name]
    said = fails(algorithm, *more)
    assert re.search(sentence, said), said
    directory = tmp_path / "run"
    assert "Traceback" in (directory / "log.txt").read_text()
    rows = read_metrics(directory) if (directory / "metrics.jsonl").exists() else []
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(
        row["train/skipped"] == 1.0 and row["publish/version"] == 1.0 for row in rows if "publish/version" in row
    )
    assert CheckpointStore(directory / "checkpoints").latest() == (steps or None)
    assert not list(directory.rglob("*.tmp"))
    if (timeline := directory / "timeline.json").exists():  # some phase was through
        assert json.loads(timeline.read_text())


def test_skipped_steps_are_counted_over_a_resume(fails, tiny, tmp_path):
    more = [LOSS + "nan_loss", "train.max_skipped=2", "train.updates_per_rollout=1"]
    assert main(command(tiny, tmp_path, "grpo", *more, "trainer.steps=2")) == 0
    said = fails("grpo", *more, "trainer.steps=9")
    assert "phase 'train' of step 2: 3 optimizer steps in a row had gradients that are not finite" in said


def shorten(checkpoint, model):
    file = checkpoint / "exp_avg-00000.safetensors"
    os.truncate(file, 1000)
    return f"{file.name} has 1000 bytes instead of"


def flip(checkpoint, model):
    file = checkpoint / "master-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return f"{file.name} has another checksum than when it was written"


def lose(checkpoint, model):
    (checkpoint / "manifest.json").unlink()
    return "manifest.json is missing"


def another_model(checkpoint, model):
    config = task.model_config()
    config.intermediate_size *= 2
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(model)
    return "is of another model"


@pytest.mark.parametrize("damage", [shorten, flip, lose, another_model])
def test_a_checkpoint_that_is_damaged_or_foreign_is_refused(damage, fails, tiny, tmp_path):
    model = shutil.copytree(tiny / "model", tmp_path / "model")
    arguments = command(tiny, tmp_path, "sft", "trainer.steps=1", "trainer.save_every=1")
    assert main([f"model.path={model}", *arguments[1:]]) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    reason = damage(checkpoint, model)
    said = fails("sft", "trainer.steps=2", model=model)
    assert str(checkpoint) in said and reason in said
    assert checkpoint.is_dir()  # nothing is thrown away


def test_a_disk_that_is_full_or_read_only(tiny, tmp_path):
    """On a small file system of its own, in a process that may mount one."""
    for unshare in (["unshare", "-rm"], ["unshare", "-m"]):
        if subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True).returncode == 0:
            break
    else:
        pytest.skip("this machine lets nobody mount a tmpfs")
    program = str(Path(__file__).with_name("small_disk.py"))
    done = subprocess.run(
        [*unshare, sys.executable, program, tiny, tmp_path],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all disks were full" in done.stdout
