"""Whole runs with SGLang inside the job, through the command line: teachers, versions, canary, death, Ctrl-C.

Where PyTorch sees no GPU, SGLANG_USE_CPU_ENGINE=1 runs the same on the CPU, in an environment that has both SGLang and
rlpost's other requirements.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from killing import Run, alive
from transformers import AutoConfig, AutoModelForCausalLM

from rlpost.observe.metrics import read_metrics
from rlpost.quickstart import task

ON_CPU = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or ON_CPU), reason="needs CUDA"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

STEPS = 3
START_S, NOTICED_S = 400, 10


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    """model/ (random weights, in sizes that every attention kernel of SGLang takes) and data/train.jsonl."""
    folder = tmp_path_factory.mktemp("given")
    task.write(folder, seed=0)
    config = AutoConfig.from_pretrained(folder / "model")
    config.update({"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    return folder


class Job(Run):
    """A run of `python -m rlpost`, and every process that it starts, known by their sessions: one that loses its parent
    keeps its session, while the titles that SGLang gives its processes overwrite command line and environment."""

    def __init__(self, given: Path, runs: Path, *overrides: str, ranks: int = 0):
        self.directory = runs / "run"
        settings = {
            "model.path": given / "model",
            "model.dtype": "fp32" if ON_CPU else "bf16",
            "data.train": given / "data" / "train.jsonl",
            "run.dir": runs,
            "run.name": "run",
            "algorithm": "sdpo",
            "algorithm.top_k": 8,
            "phases": "sdpo",
            "teacher": "ema",
            "feedback": "quickstart",
            "reward._target_": "toy_rewards.variety",
            "engine.name": "sglang",
            "engine.memory_fraction": 0.1 if ON_CPU else 0.5,  # of a GPU little is taken: max_total_tokens
            "+engine.extra.max_total_tokens": 8192,
            "+engine.extra.disable_cuda_graph": "true",
            "rollout.canary": "always",
            "rollout.prompts_per_step": 4,
            "rollout.samples_per_prompt": 2,
            "rollout.max_response_tokens": 12,
            "trainer.plots": "false",
            "tracker.tensorboard": "false",
        }
        arguments = [*(f"{name}={value}" for name, value in settings.items()), *overrides]
        super().__init__(arguments, ranks)
        self.sessions = {self.process.pid}

    def wait_for_steps(self, steps: int) -> None:
        assert self.wait_for(r"^step +\d+/", START_S, times=steps), self.text
        self.pids()
        engines = [command for command in self.processes().values() if "scheduler" in command]
        assert engines, f"no engine among {self.processes()}"  # or nothing is shown where none is left

    def pids(self) -> list[int]:
        ranks = super().pids()
        self.sessions |= {os.getsid(pid) for pid in self._pids if alive(pid)}
        return ranks

    def processes(self) -> dict[int, str]:
        """Those that are left, by their command lines."""
        found = {}
        for pid in (int(folder.name) for folder in Path("/proc").glob("[0-9]*")):
            try:
                if os.getsid(pid) in self.sessions and alive(pid):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            except OSError:
                continue  # gone meanwhile
        return found

    def wait_for_host(self) -> None:
        """Of its engine: it imports SGLang while the run still reads its data."""

        def is_there() -> bool:
            self.pids()
            return any("sglang_host" in command for command in self.processes().values())

        assert self.wait_until(is_there, START_S), self.text

    def left(self, within_s: float = 2.0) -> dict[int, str]:
        until = time.monotonic() + within_s
        while (found := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.pids()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(given, tmp_path) -> Iterator:
    jobs = []

    def start_job(*overrides: str, ranks: int = 0) -> Job:
        jobs.append(Job(given, tmp_path, *overrides, ranks=ranks))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.clean_up()


ENGINE_TEACHER = ("teacher.backend=engine", "algorithm.mode=sampled", "algorithm.alpha=1")


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        pytest.param((), 0, id="swap"),
        pytest.param((*ENGINE_TEACHER, "teacher.engine=own"), 0, id="own"),
        pytest.param((*ENGINE_TEACHER, "teacher.engine=shared"), 0, id="shared"),
        pytest.param((), 2, id="an engine for each of two", marks=needs_two),
        pytest.param(("parallel.tensor=2", "engine.tensor_parallel=2"), 2, id="one engine over two", marks=needs_two),
    ],
)
def test_a_run_publishes_agrees_and_leaves_nothing(start, overrides, ranks):
    job = start(f"trainer.steps={STEPS}", *overrides, ranks=ranks)
    job.wait_for_steps(1)
    assert job.end(START_S)[0] == 0, job.text
    rows = [row for row in read_metrics(job.directory / "metrics.jsonl") if "train/loss" in row]
    assert "serves after" in job.text  # the engine's start, a minute or two on a GPU, is no silence
    versions = [row["publish/version"] for row in rows]
    assert len(versions) == STEPS and versions == sorted(set(versions))
    assert all(row["policy/logprob_diff"] <= 0.01 for row in rows)
    assert all(row["rollout/canary"] <= 0.05 for row in rows)
    assert not job.left()
    assert AutoModelForCausalLM.from_pretrained(job.directory / "export").config.hidden_size == 256
    shutil.rmtree(job.directory)


def test_a_killed_engine_ends_the_run_with_a_sentence(start):
    job = start("trainer.steps=500")
    job.wait_for_steps(2)
    schedulers = [pid for pid, command in job.processes().items() if "scheduler" in command]
    os.kill(schedulers[0], signal.SIGKILL)
    assert job.end(NOTICED_S)[0] == 1
    assert "the SGLang engine died" in job.text and "failed in phase" in job.text
    assert not job.left()


@pytest.mark.skipif(ON_CPU, reason="needs CUDA")
def test_an_engine_in_fp32_is_refused_before_anything_is_loaded(start):
    job = start("model.dtype=fp32")
    assert job.end(60)[0] == 2 and "set model.dtype=bf16, or engine.dtype=bf16" in job.text, job.text


def test_ctrl_c_saves_and_leaves_nothing(start):
    job = start("trainer.steps=500")
    job.wait_for_steps(2)
    job.process.send_signal(signal.SIGINT)
    assert job.end(60)[0] == 0, job.text
    assert list((job.directory / "checkpoints").iterdir())
    assert not job.left()


def test_no_engine_outlives_a_killed_trainer(start):
    job = start("trainer.steps=500")
    job.wait_for_steps(1)
    job.process.kill()
    assert not job.left(within_s=NOTICED_S)


def test_no_host_outlives_a_trainer_killed_before_its_engine_starts(start):
    job = start()
    job.wait_for_host()
    job.process.kill()
    assert not job.left(within_s=NOTICED_S)


def test_no_host_is_left_by_a_run_that_does_not_start(start):
    job = start("data.prompt_key=promt")
    job.wait_for_host()
    assert job.end(60)[0] == 1 and "Did you mean 'prompt'" in job.text, job.text
    assert not job.left()
