"""The router's load-balancing loss against Transformers' own, sequence by sequence."""

import pytest
import torch
from tiny_models import Oracle, largest_difference, make_policy, pack, policy_loss, random_sequences, save_model

LENGTHS = [(3, 4), (5, 40), (1, 1), (9, 4), (20, 1), (9, 12)]


def sequences_with_a_shared_prompt():
    """The last has the prompt of the fourth, which runs once; the fifth has no live token and no loss."""
    sequences = random_sequences(1, LENGTHS)
    sequences[5]["ids"][:9] = sequences[3]["ids"][:9]
    sequences[4]["loss_mask"].zero_()
    return sequences


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("cuts", [[6], [2, 3, 1]])
def test_a_step_equals_transformers_however_cut_and_recomputed(recompute, cuts, tmp_path):
    path = save_model("qwen3-moe", tmp_path)
    policy = make_policy(path, recompute=recompute, router_aux_loss=0.1)
    oracle = Oracle(path, router_aux_loss=0.1)
    for _ in range(2):
        sequences = sequences_with_a_shared_prompt()
        denominator = float(sum(q["loss_mask"].sum() for q in sequences))
        parts, rest = [], sequences
        for cut in cuts:
            parts, rest = [*parts, pack(rest[:cut], denominator)], rest[cut:]
        metrics, expected = policy.train_step(parts, policy_loss), oracle.step(sequences)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert metrics["router/aux_loss"] > 1  # 1 where all experts are used evenly
    assert largest_difference(policy.hf_tensors(), oracle.weights()) <= 2e-6


def test_it_moves_the_gradient_and_is_off_by_default(tmp_path):
    path = save_model("qwen3-moe", tmp_path)
    sequences = sequences_with_a_shared_prompt()
    denominator = float(sum(q["loss_mask"].sum() for q in sequences))
    without, with_it = (
        make_policy(path, **more).train_step([pack(sequences, denominator)], policy_loss)
        for more in ({}, {"router_aux_loss": 0.1})
    )
    assert "router/aux_loss" not in without
    assert without["train/loss"] == with_it["train/loss"]
    assert abs(without["train/grad_norm"] / with_it["train/grad_norm"] - 1) > 1e-3


def test_scoring_has_none(tmp_path):
    policy = make_policy(save_model("qwen3-moe", tmp_path), router_aux_loss=0.1)
    micro = pack(random_sequences(0, LENGTHS), 1.0)
    with torch.enable_grad():
        policy.score([micro], lambda head, m: {"logp": head.logprobs(m.target_N).logprobs_N})
    assert policy._balance.total(1) == 0


def test_a_dense_model_has_no_router(tmp_path):
    with pytest.raises(ValueError, match=r"model.router_aux_loss=0.1: the model \(qwen3\) has no experts"):
        make_policy(save_model("qwen3", tmp_path), router_aux_loss=0.1)
