"""A run whose reward collapses goes back to the best of its checkpoints, and stops when that did not help."""

from launch import run_python
from overrides import command
from safetensors.torch import load_file

from rlpost.observe.metrics import read_metrics


def trained(directory, step):
    """Masters, both moments and the teacher."""
    files = sorted((directory / "checkpoints" / f"step_{step:06d}").glob("*-*.safetensors"))
    return {(file.name, name): tensor for file in files for name, tensor in load_file(file).items()}


def test_a_collapse_goes_back_to_the_best_checkpoint(tiny, tmp_path):
    more = [
        "reward._target_=toy_rewards.collapsing",  # from the fourth version of the weights on
        f"data.eval.held_out={{path: {tiny / 'data' / 'eval.jsonl'}, limit: 4}}",
        *("trainer.steps=9", "trainer.keep=1", "trainer.eval_every=2", "trainer.save_every=2"),
        *("guards.action=fallback", "guards.window=1", "guards.max_fallbacks=1"),
        *("algorithm.reward_weight=1", "teacher=ema", "train.updates_per_rollout=1"),
    ]
    run = run_python(["-m", "rlpost", *command(tiny, tmp_path, "blend", *more)])
    assert run.returncode == 0, run.stderr
    directory = tmp_path / "run"
    assert "step 4: the reward fell to 0 over the last 1 steps" in run.stderr
    assert "step 4: fell back to the weights of step 2, whose evaluation was" in run.stderr
    assert "(1 of 1); steps and data go on" in run.stderr
    assert "step 5: cannot fall back, as guards.max_fallbacks=1 were done: stopping" in run.stderr
    assert [row["step"] for row in read_metrics(directory) if "rollout/samples" in row] == [1, 2, 3, 4, 5]
    # keep=1, and the best one beside it; nothing was learned since.
    steps = sorted(path.name for path in (directory / "checkpoints").glob("step_*"))
    assert steps == ["step_000002", "step_000005"]
    best, last = trained(directory, 2), trained(directory, 5)
    assert {name.split("-")[0] for name, _ in best} == {"master", "exp_avg", "exp_avg_sq", "tag.teacher"}
    assert best.keys() == last.keys() and all(best[name].equal(last[name]) for name in best)
