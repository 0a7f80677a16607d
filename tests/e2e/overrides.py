"""Command lines over the tiny model that the end-to-end tests share."""

from pathlib import Path

SDPO = ["algorithm=sdpo", "phases=sdpo", "teacher=ema", "feedback=quickstart", "teacher.alpha=0.1"]
ALGORITHMS = {
    "sdpo": [*SDPO, "algorithm.mode=topk", "algorithm.top_k=8"],
    "sdpo_full": [*SDPO, "algorithm.mode=full"],
    "grpo": ["algorithm=grpo", "phases=grpo", "train.updates_per_rollout=2", "algorithm.kl_loss_coef=0.1"],
    # The KL is in returns that are whitened over the step: sums over ranks before the loss.
    "reinforce_pp": ["algorithm=reinforce_pp", "phases=grpo", "algorithm.kl_coef=0.1", "rollout.filter=nonzero_std"],
    # The values of a second model are in advantages that are whitened over the step.
    "ppo": ["algorithm=ppo", "phases=ppo", "algorithm.kl_coef=0.1", "critic.lr=1e-2", "critic.eps=1e-3"],
    "blend": [
        *SDPO,
        "algorithm=blend",
        "algorithm.sdpo.mode=full",
        "teacher=trust_region",
        "train.updates_per_rollout=2",
    ],
    "sft": ["algorithm=sft", "phases=sft"],
}


def command(tiny: Path, out: Path, algorithm: str, *more: str) -> list[str]:
    """The overrides of a short run of this algorithm in out/run."""
    rows = "sft" if algorithm == "sft" else "train"
    return [
        f"model.path={tiny / 'model'}",
        f"data.train={tiny / 'data' / rows}.jsonl",
        f"run.dir={out}",
        "rollout.prompts_per_step=5",
        "rollout.samples_per_prompt=3",
        "rollout.max_response_tokens=7",
        "trainer.steps=2",
        "trainer.plots=false",
        "tracker.tensorboard=false",
        # A large eps keeps Adam smooth in the gradient: rounding noise of a cut must not become a full step.
        "optim.lr=1e-2",
        "optim.eps=1e-3",
        "reward._target_=toy_rewards.variety",
        *ALGORITHMS[algorithm],
        *more,
    ]
