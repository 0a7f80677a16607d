"""The same step under every cut gives the numbers of one plain PyTorch process."""

import json
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from policy_cuts_worker import (
    KINDS,
    OVERLAP,
    UPDATES,
    flat,
    has_critic,
    kinds_of,
    policy_loss,
    sequences_of,
    steps_only,
)
from tiny_critic import save_critic
from tiny_models import OPTIM, largest_difference, make_policy, pack, save_model, token_mean

from rlpost.config.schema import OptimConfig

WORKER = Path(__file__).parent / "policy_cuts_worker.py"
LAYOUTS = {
    1: ["ep1", "ep1-full"],
    2: [
        *("dp2", "tp2", "tp2-sp", "pp2", "pp2-vpp2", "cp2", "ep2", "tp2-sp-ep2", "cp2-ep2"),
        *("ep1-dp2", "tp2-sp-ep1", "pp2-ep1", "pp2-vpp2-ep1", "cp2-ep1", "ep1-etp2"),
        *("pp2-odd", "tp2-sp-full", "pp2-selective", "tp2-sp-ep2-selective", "pp2-ep1-full"),
    ],
    4: [
        *("tp2-sp-dp2", "pp4", "pp4-vpp2", "pp2-dp2", "tp2-sp-pp2", "cp4", "tp2-sp-cp2"),
        *("pp2-ep2", "tp2-sp-cp2-ep2", "tp2-sp-pp2-ep2", "ep2-etp2", "tp2-sp-ep2-etp2", "pp4-ep1", "pp4-odd"),
    ],
}
CASES = [layout for layouts in LAYOUTS.values() for layout in layouts]
WHOLE_CASES = [layout for layout in CASES if not steps_only(layout)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("cuts")


@pytest.fixture(scope="module")
def results(directory):
    """For each layout, the results of every rank."""
    for kind in KINDS:
        save_model(kind, directory / "models")
    save_critic("qwen3", directory / "models")
    by_layout = {}
    for ranks, layouts in LAYOUTS.items():
        done = run_ranks([str(WORKER), str(directory), *layouts], ranks, timeout=900)
        assert done.returncode == 0, done.stderr[-4000:]
        everyone = json.loads((directory / "results.json").read_text())
        by_layout |= dict.fromkeys(layouts, everyone)
    return by_layout


@pytest.mark.parametrize("layout, kind", [(layout, kind) for layout in CASES for kind in kinds_of(layout)])
def test_steps_equal_plain_pytorch(layout, kind, results):
    for rank in results[layout]:
        got = rank[f"steps/{layout}/{kind}"]
        assert got["loaded"] == 0
        assert got["logp"] <= 2e-5
        assert got["metrics0"] <= 1e-5
        assert got["metrics1"] <= 1e-5  # here one data-parallel rank has no live token
        assert got["weights"] <= 2e-6


@pytest.mark.parametrize("layout", [layout for layout in WHOLE_CASES if has_critic(layout)])
def test_steps_of_the_critic_equal_plain_pytorch(layout, results):
    for rank in results[layout]:
        got = rank[f"critic/{layout}"]
        assert got["loaded"] == 0
        assert got["values0"] <= 2e-5 and got["values1"] <= 5e-5  # the second is after a step
        assert got["metrics0"] <= 1e-5 and got["metrics1"] <= 1e-5
        assert got["weights"] <= 5e-6


@pytest.mark.parametrize("layout", OVERLAP)
def test_overlapped_collectives_change_nothing(layout, results):
    for rank in results[layout]:
        got = rank[f"overlap/{layout}"]
        assert got["metrics"] <= 1e-5 and got["scores"] <= 1e-6 and got["weights"] <= 2e-6
        assert got["skipped"] == [0.0, 0.0, 0.0, 1.0, 0.0] and got["swapped"]
    assert results[layout][0][f"overlap/{layout}"]["buckets"] > 1  # Megatron cuts those of the first stage alone


@pytest.mark.parametrize("layout", WHOLE_CASES)
def test_a_gradient_that_is_not_finite_on_one_rank_moves_nobody(layout, results):
    for rank in results[layout]:
        assert rank[f"skip/{layout}"] == {"skipped": 1.0, "moved": 0.0}


@pytest.mark.parametrize("layout", WHOLE_CASES)
def test_an_average_of_the_masters_gathers_and_scatters_bit_exactly(layout, results):
    for rank in results[layout]:
        assert rank[f"average/{layout}"] == {"gathered": 0.0, "scattered": 0.0, "swapped": 0.0}


@pytest.mark.parametrize("layout", WHOLE_CASES)
def test_bf16_and_fp16_run_and_all_ranks_scale_down_together(layout, results):
    for rank in results[layout]:
        got = rank[f"low/{layout}"]
        *state, loss, grad_norm = got["bf16"]
        assert state == [0.0, None] and loss < 0.02
        assert got["overflow"] == [1.0, 2.0**16, True]
        *state, loss, grad_norm = got["fp16"]
        assert state == [0.0, 2.0**15] and loss < 5e-3 and grad_norm < 1e-2  # three more bits than bf16


@pytest.mark.parametrize("layout", UPDATES)
def test_one_and_two_updates_of_a_rollout_equal_plain_pytorch(layout, results):
    for rank in results[layout]:
        got = rank[f"updates/{layout}"]
        assert [row["updates"] for row in got.values()] == [1, 1, 2, 2]
        assert got["1 of 24"]["micro_batches"] > got["1 of 10000"]["micro_batches"] == 1
        for row in got.values():
            assert row["metrics"] <= 1e-5
            assert row["weights"] <= 2e-6


RESHARDED = [("dp2", other) for other in ("same-dp2", "tp2", "tp2-sp", "pp2", "cp2")]
RESHARDED += [("ep2", other) for other in ("same-ep2", "ep1-dp2", "tp2-sp-ep1", "tp2-sp-ep2", "pp2-ep1", "ep1-etp2")]


@pytest.mark.parametrize("source, target", RESHARDED)
def test_optimizer_state_goes_on_in_other_layouts(source, target, results):
    for rank in results[source]:
        got = rank[f"reshard/{source}"][target]
        assert got["exact"] == 0
        if target.startswith("same-"):
            assert got["metrics"] == got["weights"] == 0
        assert got["metrics"] <= 1e-5
        assert got["weights"] <= 2e-6


def test_optimizer_state_of_two_data_parallel_ranks_goes_on_in_one_process(results, directory):
    saved = torch.load(directory / "state-dp2.pt", weights_only=True)
    policy = make_policy(directory / "models" / "qwen2", OptimConfig(lr=1e-2, eps=OPTIM.eps, warmup_steps=3))
    for kind, tensors in saved["state"].items():
        policy.load_optimizer_tensors(kind, tensors.__getitem__)
        assert largest_difference(policy.optimizer_tensors(kind), tensors) == 0
    policy.load_optimizer_scalars(saved["scalars"])
    sequences = flat(sequences_of(2))
    metrics = policy.train_step([pack(sequences, token_mean(sequences))], policy_loss)
    assert metrics == pytest.approx(saved["metrics"], rel=1e-5)
    assert largest_difference(policy.hf_tensors(), saved["after"]) <= 2e-6
