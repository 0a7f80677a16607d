"""What is scored before a step: the reference, which may move, and the old log-probs, which often need no scoring."""

import pytest
from overrides import command

from rlpost import Trainer
from rlpost.observe.metrics import read_metrics


def run(tiny, out, *more):
    """A run of four steps; (its metrics, what was scored in each step)."""
    options = [o for o in command(tiny, out, "grpo", *more) if not o.startswith("reward._target_")]
    options = [o for o in options if not o.startswith("train.updates_per_rollout")] + ["tracker.progress=false"]
    trainer = Trainer.from_recipe(None, options, reward=lambda sample: float(len(set(sample.response_ids))))
    scored, score = [], trainer.rooms.score_logprobs
    trainer.rooms.score_logprobs = lambda kind, updates: (scored.append(kind), score(kind, updates))[1]
    trainer.fit(4)
    trainer.close()
    return [row for row in read_metrics(out / "run") if "train/loss" in row], scored


@pytest.mark.parametrize("every", [1, 2, None])
def test_the_reference_becomes_the_policy_every_so_many_steps(every, tiny, tmp_path):
    """Where it has just become the policy, their KL is exactly 0. One update a rollout: no old log-probs are scored."""
    rows, scored = run(tiny, tmp_path, f"algorithm.reference_every={'null' if every is None else every}")
    fresh = [step for step, row in enumerate(rows) if row["policy/kl"] == 0]
    assert fresh == [step for step in range(4) if step == 0 or (every and step % every == 0)]
    assert all(row["policy/kl"] > 0 for step, row in enumerate(rows) if step not in fresh)
    assert scored == ["reference_logprobs"] * 4
    assert all(row["rollout/staleness/max"] == 0 and row["policy/ppo_kl"] == 0 for row in rows)


def test_two_updates_a_rollout_need_old_logprobs_and_no_coefficient_needs_no_reference(tiny, tmp_path):
    more = ["algorithm.kl_loss_coef=0", "++train.updates_per_rollout=2"]
    rows, scored = run(tiny, tmp_path, *more)
    assert scored == ["old_logprobs"] * 4
    assert any(row["policy/ppo_kl"] != 0 for row in rows) and "policy/kl" not in rows[0]
