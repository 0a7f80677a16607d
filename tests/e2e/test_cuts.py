"""The same run under different launches: losses, gradient norms and rollouts agree."""

import json
from pathlib import Path

import pytest
from launch import run_python, run_ranks
from overrides import ALGORITHMS, command

from rlpost.observe.metrics import read_metrics

HERE = str(Path(__file__).parent)
LAUNCHES = {
    "small micro-batches": (1, ["train.max_tokens_per_micro_batch=30"]),
    "data parallel 2": (2, []),
    "tensor parallel 2": (2, ["parallel.tensor=2"]),
    "tensor parallel 2 with sequence parallel": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "pipeline parallel 2": (2, ["parallel.pipeline=2"]),
    "context parallel 2": (2, ["parallel.context=2"]),
}


def launch(tiny, out, algorithm, ranks, more):
    arguments = ["-m", "rlpost", *command(tiny, out, algorithm, *more)]
    env = {"PYTHONPATH": f"{Path(__file__).parents[2] / 'src'}:{HERE}"}
    run = run_python(arguments, env=env) if ranks == 1 else run_ranks(arguments, ranks, env=env)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [row for row in read_metrics(out / "run") if "train/loss" in row]
    responses = []
    for step in (1, 2):
        lines = (out / "run" / "rollouts" / "train" / f"{step}.jsonl").read_text().splitlines()
        responses.append([(r["group_id"], r["index"], r["response"]) for r in map(json.loads, lines)])
    return rows, responses


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_launch_gives_the_same_run(algorithm, tiny, tmp_path):
    rows, responses = launch(tiny, tmp_path / "one", algorithm, 1, [])
    assert len(rows) == 2
    for name, (ranks, more) in LAUNCHES.items():
        other, others_responses = launch(tiny, tmp_path / name.replace(" ", "_"), algorithm, ranks, more)
        assert others_responses == responses, name
        for row, there in zip(rows, other):
            for key in row:
                if key.startswith(("perf/", "publish/seconds")):
                    continue
                # Sampled log-probs and weights carry float32 rounding of another order of sums.
                assert there[key] == pytest.approx(row[key], rel=1e-5, abs=2e-6), (name, key)
