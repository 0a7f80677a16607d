"""Guards against collapse: what a run's curves must not do, said within a window of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from statistics import fmean
from typing import Any

from rlpost.config.schema import GuardsConfig, TrainConfig
from rlpost.policy.loss_scale import OVERFLOWS, scale_is_settling

REWARD, LENGTH, DISTANCE = "rollout/reward/mean", "rollout/response_tokens/mean", "ema/distance"
ENTROPIES = ("policy/entropy", "sdpo/student_entropy")
FLAT_STEPS = 5  # with one and the same reward for all samples, before it is said


class Guards:
    """Fed with each step's metrics; says what went wrong, once for each time that it begins.

    A signal is its mean over the last `window` steps that had it, compared as soon as the window is full: the reward
    with the best window so far, the length with the first one, entropy and teacher distance with fixed bounds.

    It remembers evaluations too, so that the run can fall back to the best of its checkpoints.
    """

    def __init__(self, config: GuardsConfig):
        self.config = config
        self.values: dict[str, deque[float]] = {}
        self.best_reward: float | None = None
        self.first_length: float | None = None
        self.raised: set[str] = set()
        self.scores: dict[int, float] = {}  # steps done → mean over the eval sets
        self.fallbacks = 0
        self.skipped_in_a_row = {"optim": 0, "critic": 0}  # steps whose gradient was not finite, by optimizer
        self.flat_in_a_row = 0

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """One sentence for each alarm that begins with this step."""
        means = {}
        for name in (REWARD, LENGTH, DISTANCE, *ENTROPIES):
            if name in metrics:
                values = self.values.setdefault(name, deque(maxlen=self.config.window))
                values.append(metrics[name])
                if len(values) == self.config.window:
                    means[name] = fmean(values)
        alarms = {name: text for name in means if (text := self._alarm(name, means[name])) is not None}
        begun = [text for name, text in alarms.items() if name not in self.raised]
        self.raised = (self.raised - means.keys()) | alarms.keys()
        return begun

    def hint(self, metrics: Mapping[str, float]) -> str | None:
        """Said once, as soon as rewards have told nothing for some steps. No alarm: nothing collapsed, and feedback may
        teach all the same."""
        if self.flat_in_a_row == FLAT_STEPS:
            return None
        flat = metrics.get("rollout/reward/std") == 0 and metrics["rollout/samples"] > 1
        self.flat_in_a_row = self.flat_in_a_row + 1 if flat else 0
        if self.flat_in_a_row < FLAT_STEPS:
            return None
        return (
            f"every sample of the last {FLAT_STEPS} steps had the reward {metrics[REWARD]:g}: rewards tell the model "
            "nothing so far. Read some samples in rollouts/train: does it answer in the form that the reward looks for?"
        )

    def gradient(self, optimizer: str, metrics: Mapping[str, float], prefix: str, train: TrainConfig) -> None:
        """An optimizer step's `<prefix>/skipped`: RuntimeError where a gradient that is not finite ends the run."""
        counts, skipped = self.skipped_in_a_row, metrics[f"{prefix}/skipped"] > 0
        if skipped and scale_is_settling(metrics, prefix):
            return
        counts[optimizer] = in_a_row = counts[optimizer] + 1 if skipped else 0
        if skipped and not train.skip_nonfinite:
            raise RuntimeError("the gradient is not finite (train.skip_nonfinite=false)")
        if in_a_row > train.max_skipped:
            fp16 = f"; {OVERFLOWS}" if f"{prefix}/loss_scale" in metrics else ""
            raise RuntimeError(
                f"{in_a_row} optimizer steps in a row had gradients that are not finite "
                f"(train.max_skipped={train.max_skipped}): lower {optimizer}.lr, or look at the rollouts{fp16}"
            )

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of an evaluation after this many steps: `eval/<name>/mean@n` of each set."""
        if means := [value for name, value in metrics.items() if "/mean@" in name]:
            self.scores[step] = fmean(means)

    def best(self, steps: Collection[int]) -> int | None:
        """Of these steps the one with the best evaluation, the latest of several; None where none was evaluated, and
        where the run never falls back."""
        known = [step for step in steps if step in self.scores]
        if self.config.action != "fallback" or not known:
            return None
        return max(known, key=lambda step: (self.scores[step], step))

    def fell_back(self) -> None:
        """The windows of what was given up are empty; what is compared with them stays."""
        self.fallbacks += 1
        self.values.clear()
        self.raised.clear()

    def _alarm(self, name: str, mean: float) -> str | None:
        config, over = self.config, f"over the last {self.config.window} steps"
        if name == REWARD:
            self.best_reward = mean if self.best_reward is None else max(self.best_reward, mean)
            if self.best_reward > 0 and mean < (1 - config.reward_drop) * self.best_reward:
                return f"the reward fell to {mean:.4g} {over}, from {self.best_reward:.4g} at its best"
        elif name == LENGTH:
            self.first_length = mean if self.first_length is None else self.first_length
            ratio = mean / max(self.first_length, 1e-9)
            if ratio > config.length_factor or ratio < 1 / config.length_factor:
                return f"responses have {mean:.4g} tokens {over}, {ratio:.2g} times as many as at the start"
        elif name == DISTANCE:
            if config.max_teacher_distance is not None and mean > config.max_teacher_distance:
                return f"{name} is {mean:.4g} {over}, above guards.max_teacher_distance={config.max_teacher_distance}"
        elif mean < config.min_entropy:
            return f"{name} is {mean:.4g} nats {over}, below guards.min_entropy={config.min_entropy}"
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": {name: list(values) for name, values in self.values.items()},
            "best_reward": self.best_reward,
            "first_length": self.first_length,
            "raised": sorted(self.raised),
            "scores": list(self.scores.items()),  # JSON has no numbers as keys
            "fallbacks": self.fallbacks,
            "skipped_in_a_row": self.skipped_in_a_row,
            "flat_in_a_row": self.flat_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = {n: deque(values, maxlen=self.config.window) for n, values in state["values"].items()}
        self.best_reward, self.first_length = state["best_reward"], state["first_length"]
        self.raised, self.fallbacks = set(state["raised"]), state["fallbacks"]
        self.scores = {step: score for step, score in state["scores"]}
        self.skipped_in_a_row = dict(state["skipped_in_a_row"])
        self.flat_in_a_row = state.get("flat_in_a_row", 0)  # checkpoints before it existed lack it
