"""The same run under different launches: losses, gradient norms and rollouts agree."""

import json

import pytest
import torch
from exports import distance_of_export
from launch import run_python, run_ranks
from overrides import ALGORITHMS, command
from transformers import Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlpost.observe.metrics import read_metrics
from rlpost.quickstart import task

LAUNCHES = {
    "small micro-batches": (1, ["train.max_tokens_per_micro_batch=30"]),
    "data parallel 2": (2, []),
    "tensor parallel 2": (2, ["parallel.tensor=2"]),
    "tensor parallel 2 with sequence parallel": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "pipeline parallel 2": (2, ["parallel.pipeline=2"]),
    "context parallel 2": (2, ["parallel.context=2"]),
    "data parallel 2 with overlap": (2, ["train.overlap=true"]),
    "expert parallel 2": (2, ["parallel.expert=2"]),
    "experts cut in 2": (2, ["parallel.expert_tensor=2"]),
}


def launch(tiny, out, algorithm, ranks, more):
    arguments = ["-m", "rlpost", *command(tiny, out, algorithm, *more)]
    run = run_python(arguments) if ranks == 1 else run_ranks(arguments, ranks)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [row for row in read_metrics(out / "run") if "train/loss" in row]
    responses = []
    for step in (1, 2):
        lines = (out / "run" / "rollouts" / "train" / f"{step}.jsonl").read_text().splitlines()
        responses.append([(r["group_id"], r["index"], r["response"]) for r in map(json.loads, lines)])
    return rows, responses


# Every layout for one algorithm, the cheap ones for the others: what a layout does to a step does not depend on them,
# and tests/distributed/test_policy_cuts.py has the whole table.
DENSE = [name for name in LAUNCHES if not name.startswith("expert")]
CASES = {name: DENSE if name == "sdpo" else ["data parallel 2"] for name in ALGORITHMS}
CASES["ppo"] = [*CASES["ppo"], "pipeline parallel 2"]  # two models in one schedule's groups
CASES["grpo"] = CASES["sft"] = ["small micro-batches", "tensor parallel 2 with sequence parallel"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_launch_gives_the_same_run(algorithm, tiny, tmp_path):
    compare(tiny, tmp_path, algorithm, CASES[algorithm])


def test_key_value_heads_that_the_ranks_do_not_divide(tiny, tmp_path):
    """SmolLM2-135M has three: they are padded with zero heads, which change nothing and are not published."""
    config = task.model_config()
    config.num_attention_heads, config.num_key_value_heads, config.tie_word_embeddings = 6, 3, True
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    task.make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").symlink_to(tiny / "data")
    compare(tmp_path, tmp_path, "sdpo", ["tensor parallel 2"], "publish.verify=always")


def test_a_mixture_of_experts(tiny, tmp_path):
    """Trains, samples and exports under the names on disk, whichever ranks have the experts."""
    dense = task.model_config().to_dict()
    del dense["architectures"], dense["model_type"]
    config = Qwen3MoeConfig(**dense, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    task.make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").symlink_to(tiny / "data")
    launches = ["expert parallel 2", "experts cut in 2"]
    compare(tmp_path, tmp_path, "sdpo", launches, "publish.verify=always", "model.router_aux_loss=0.01")
    assert distance_of_export(tmp_path / "expert_parallel_2" / "run", "parallel.expert=1") < 2e-5


def compare(tiny, tmp_path, algorithm, names, *more):
    rows, responses = launch(tiny, tmp_path / "one", algorithm, 1, more)
    assert len(rows) == 2
    for name in names:
        ranks, layout = LAUNCHES[name]
        other, others_responses = launch(tiny, tmp_path / name.replace(" ", "_"), algorithm, ranks, [*layout, *more])
        assert others_responses == responses, name
        for row, there in zip(rows, other):
            for key in row:
                if key.startswith(("perf/", "publish/seconds")):
                    continue
                # Sampled log-probs and weights carry float32 rounding of another order of sums.
                assert there[key] == pytest.approx(row[key], rel=1e-5, abs=2e-6), (name, key)
