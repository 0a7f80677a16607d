"""Trainer: the loop, and what a notebook calls.

    trainer = Trainer.from_recipe("quickstart_sdpo", ["optim.lr=1e-4"])
    trainer.fit()
    trainer.generate(["…"])
    trainer.plot()

Every rank of a torchrun job builds the same Trainer and calls the same methods.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.config.checks import check_config
from rlpost.config.compose import load_config
from rlpost.config.schema import Config
from rlpost.phases import Agreement
from rlpost.rollout.engines import check_installed, prestart
from rlpost.signals import StopOnSignal
from rlpost.types import Sample

if TYPE_CHECKING:
    from rlpost.algorithms.base import Algorithm
    from rlpost.data.batching import Update
    from rlpost.feedback.base import EnvironmentFeedback

log = logging.getLogger(__name__)

PHASES = ("read", "rollout", "judge", "prepare", "values", "teach", "critic", "train", "teacher_update", "publish")
TRAINED = ("policy.weights", "policy.optimizer", "critic.weights", "critic.optimizer")  # what a checkpoint reads
RESIDENTS = (
    *("policy.weights", "policy.gradients", "policy.optimizer", "engine.weights", "engine.kv_cache"),
    *("critic.weights", "critic.gradients", "critic.optimizer", "teacher.weights", "teacher.engine"),
)
GROUP_MARGIN_S = 300.0  # the time limit of collectives is longer than any phase's: it would not say which rank hangs
UNLIMITED_S = 7 * 86400.0


@dataclass
class StepWork:
    """What one step's phases hand to each other."""

    step: int
    samples: list[Sample] = field(default_factory=list)  # this rank's until `prepare`, then everybody's
    updates: list[Update] = field(default_factory=list)  # this data-parallel rank's part of each optimizer step
    metrics: dict[str, float] = field(default_factory=dict)
    trained: bool = False
    moved: bool = False  # some optimizer step moved the weights
    teacher_due: bool = False  # the last one did, and the teacher has not followed yet


class Trainer:
    """One post-training run.

    config: the typed configuration (`Trainer.from_recipe` builds it). data: rows (a list of dicts) instead of
    `data.train`; eval_data: {name: rows} beside `data.eval`; reward: a function `fn(sample) -> float | RewardResult`
    instead of `reward`; model: a Hugging Face directory or hub id instead of `model.path`; algorithm, feedback: objects
    instead of the groups of that name; group_filter: `fn(samples of one group) -> bool` instead of `rollout.filter`.
    Raises ConfigError with every mistake of the configuration, before anything is loaded.
    """

    def __init__(
        self,
        config: Config,
        *,
        data: Sequence[Mapping[str, Any]] | None = None,
        eval_data: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        reward: Callable[[Sample], Any] | None = None,
        model: str | Path | None = None,
        algorithm: Algorithm | None = None,
        feedback: EnvironmentFeedback | None = None,
        group_filter: Callable[[Sequence[Sample]], bool] | None = None,
    ):
        if model is not None:
            config.model.path = str(model)
        if algorithm is not None:  # for the record: the run's config.yaml
            config.algorithm = {"_target_": f"{type(algorithm).__module__}.{type(algorithm).__qualname__}"}
        given = {"data": data, "reward": reward, "algorithm": algorithm, "feedback": feedback, "filter": group_filter}
        given["eval_data"] = eval_data
        objects = {name: value for name, value in given.items() if value is not None}
        check_config(config, objects)
        check_installed(config.engine.name)
        prestart(config)
        # Megatron and Transformers load only now: a wrong configuration has failed within a second.
        from rlpost.assemble import assemble
        from rlpost.parallel import init_distributed
        from rlpost.persist import find_checkpoint, restore_checkpoint, run_directory, write_provider
        from rlpost.rollout.serving import Serving

        limits = [config.trainer.phase_timeout_s, *(p.timeout_s for p in config.phases if p.timeout_s is not None)]
        init_distributed(max(limits) + GROUP_MARGIN_S if all(limits) else UNLIMITED_S)
        agreement = Agreement(run_directory(config), config.trainer.phase_timeout_s)
        self.config = config
        with agreement.guard("start", 0):
            checkpoint = find_checkpoint(config)
            self.rooms = assemble(
                config,
                run_directory(config),
                agreement,
                {name: getattr(self, f"_{name}") for name in PHASES},
                steps_done=checkpoint.state["step"] if checkpoint else 0,
                eval_data=eval_data or {},
                objects=objects,
            )
            write_provider(self.rooms)
            self.step_number = restore_checkpoint(self.rooms, checkpoint)  # steps done
        self.last_metrics: dict[str, float] = {}
        self._serving = Serving(self.rooms)
        self._stopping = False

    @classmethod
    def from_recipe(cls, name: str | None, overrides: Sequence[str] = (), **objects: Any) -> Trainer:
        """Build from `recipes/<name>.yaml` and Hydra overrides; `objects` are the constructor's Python objects."""
        placeholders = [
            f"{key}=in_memory"
            for key, given in (("data.train", "data"), ("model.path", "model"))
            if objects.get(given) is not None
        ]
        return cls(load_config(name, [*placeholders, *overrides]), **objects)

    @classmethod
    def resume(cls, directory: str | Path, overrides: Sequence[str] = (), **objects: Any) -> Trainer:
        """Go on with the run in this directory, from its last checkpoint."""
        from rlpost.persist import saved_config

        return cls(saved_config(Path(directory), overrides), **objects)

    def fit(self, steps: int | None = None) -> Trainer:
        """Train until `trainer.steps` steps are done (or `steps` more), evaluating and saving as configured; ends
        with a checkpoint, the Hugging Face export, the plots and a summary."""
        last = self.config.trainer.steps if steps is None else self.step_number + steps
        with self._signals():
            if self.step_number == 0 and self.config.trainer.eval_at_start:
                self._evaluate_in_between()
            self.rooms.observer.say(f"training from step {self.step_number} to {last}")
            while self.step_number < last and not self._stopping:
                self.step()
                if self._due(self.config.trainer.eval_every) and self.step_number < last:
                    self._evaluate_in_between()
                if self._due(self.config.trainer.save_every) and self.step_number < last:
                    self._save(background=self.config.trainer.async_save)
            self.save()
            if self._stopping:
                self.rooms.observer.say(f"stopped after step {self.step_number}; run the same command to go on")
                return self
            self.evaluate()
            self.save_pretrained()
            with self._guard("record"):
                self.rooms.observer.finish(plots=self.config.trainer.plots)
        return self

    @property
    def stopped(self) -> bool:
        """A signal or a guard ended `fit` before its last step."""
        return self._stopping

    def step(self) -> dict[str, float]:
        """One step: the configured phases in their order. Returns its metrics."""
        if "rollout" in self.rooms.algorithm.needs:
            with self._guard("publish"):
                self._serving.refresh(self.step_number)
        start = time.perf_counter()
        position = self.rooms.data.state()
        work = StepWork(step=self.step_number)
        for number in range(len(self.rooms.machine.phases)):
            stop = self.rooms.machine.run(number, work.step, work)
            with self._guard("save"):
                self.rooms.checkpoints.poll()
            if stop and not work.trained:
                # Nothing has moved yet: the step is taken back, so that a resumed run does it again.
                self.rooms.data.load_state(position)
                self._stopping = True
                return {}
            self._stopping |= stop
        self.step_number += 1
        with self._guard("record"):
            self.last_metrics = self.rooms.observer.step_done(
                self.step_number, work.samples, work.metrics, time.perf_counter() - start
            )
        self._heed_guards()
        return self.last_metrics

    def evaluate(self) -> dict[str, float]:
        """Every eval set under the current weights: `eval/<name>/mean@n`, `pass@n`, standard error, lengths."""
        from rlpost.evaluate import evaluate

        if not self.rooms.eval_sets:
            return {}
        with self._guard("evaluate"):
            self._serving.ready(self.step_number)
            found = evaluate(self.rooms, self.step_number)
        self.rooms.guards.evaluated(self.step_number, found)
        return found

    def generate(self, prompts: Sequence[str | list[dict[str, str]]], n: int = 1, **sampling: Any) -> list[list[str]]:
        """n responses to each prompt (text, or chat messages); sampling: temperature, top_p, top_k, max_tokens."""
        from rlpost.evaluate import generate

        with self._guard("generate"):
            self._serving.ready(self.step_number)
            return generate(self.rooms, prompts, n, self.step_number, **sampling)

    def score(self, prompts: Sequence[str | list[dict[str, str]]], responses: Sequence[str]) -> list[list[float]]:
        """Log-probs of each response's tokens under the trained model, at the rollout temperature."""
        from rlpost.evaluate import score

        with self._guard("score"):
            self.rooms.machine.bring("policy.weights")
            return score(self.rooms, prompts, responses)

    def plot(self) -> Any:
        """The curves so far as a matplotlib figure (and as PNG files under plots/)."""
        return self.rooms.observer.plot()

    def save(self) -> Path:
        """Write a checkpoint: what `resume` needs to go on as if nothing had happened."""
        return self._save(background=False)

    def _save(self, *, background: bool) -> Path:
        from rlpost.persist import save_checkpoint

        with self._guard("save"):
            self._bring_trained()
            return save_checkpoint(self.rooms, self.step_number, background=background)

    def save_pretrained(self, directory: str | Path | None = None) -> Path:
        """Write a Hugging Face directory (default: `export/` of the run)."""
        from rlpost.persist import export

        with self._guard("export"):
            self.rooms.machine.bring("policy.weights")
            return export(self.rooms, self.step_number, directory)

    def close(self) -> None:
        """Give back the engine and close the logs."""
        self.rooms.close()
        self.rooms.agreement.close()

    # The phases, in the order of a step.

    def _read(self, work: StepWork) -> None:
        """Supervised rows: every rank reads them all, and keeps its share as a rollout would."""
        from rlpost.data.templates import sft_samples

        prompts = self.rooms.data.next_batch(self.config.rollout.prompts_per_step)
        first = work.step * self.config.rollout.prompts_per_step  # group ids are unique in the run
        samples = sft_samples(self.rooms.tokenizer, prompts, first, **self.config.data.chat_template_kwargs)
        work.samples = samples if self.rooms.agreement.rank == 0 else []

    def _rollout(self, work: StepWork) -> None:
        from rlpost.rollout.filters import sample_until_full

        self.rooms.canary.check()
        if self.rooms.group_filter is not None:
            work.samples, work.metrics = sample_until_full(self.rooms, work.step)
            return
        prompts = self.rooms.data.next_batch(self.config.rollout.prompts_per_step)
        work.samples = self.rooms.sampler.sample(prompts, work.step)

    def _judge(self, work: StepWork) -> None:
        if self.rooms.judge is not None and self.rooms.group_filter is None:  # which has judged what it kept
            work.metrics |= self.rooms.judge.score(work.samples)
        if self.rooms.feedback is not None:
            self.rooms.feedback.teacher_prompts(work.samples)

    def _prepare(self, work: StepWork) -> None:
        """All ranks get all samples; advantages over whole groups; each data-parallel rank takes its part."""
        from rlpost.rollout.sampler import rollout_metrics

        work.samples = self.rooms.gather(work.samples)
        work.metrics |= self.rooms.canary.metrics()
        work.metrics |= rollout_metrics(work.samples, self.rooms.publisher.version)
        work.metrics |= self.rooms.algorithm.prepare(work.samples)
        work.updates = self.rooms.batcher.updates(work.samples)
        needs = self.rooms.algorithm.needs
        if "reference_logprobs" in needs:
            self.rooms.move_reference(work.step)
            self.rooms.score_logprobs("reference_logprobs", work.updates)
        # Of one update they are its own log-probs.
        if "old_logprobs_always" in needs or ("old_logprobs" in needs and len(work.updates) > 1):
            self.rooms.score_logprobs("old_logprobs", work.updates)
        if "values" not in needs:
            self._finish(work)

    def _finish(self, work: StepWork) -> None:
        mine = [sample for update in work.updates for sample in update.samples]
        work.metrics |= self.rooms.algorithm.finish(mine, self.rooms.total)

    def _values(self, work: StepWork) -> None:
        """The critic's values of every state, which the advantages need."""
        self.rooms.score_values(work.updates)
        self._finish(work)

    def _teach(self, work: StepWork) -> None:
        work.metrics |= self.rooms.teacher.serve()
        for update in work.updates:
            for name, count in self.rooms.teacher.score(update).items():
                work.metrics[name] = work.metrics.get(name, 0.0) + count

    def _critic(self, work: StepWork) -> None:
        """One step of the critic's own optimizer for each update."""
        steps = []
        work.trained = True
        for update in work.updates:
            if update.has_signal:
                micros = self.rooms.batcher.pack(update)
                steps.append(self.rooms.critic.train_step(micros, self.rooms.algorithm.value_loss))
                self.rooms.guards.gradient("critic", steps[-1], "critic", self.config.train)
        work.metrics |= _means(steps)

    def _train(self, work: StepWork) -> None:
        """One optimizer step for each update. An update without a signal (all rewards equal, nothing to distill) is
        left out and counted; one whose gradient is not finite is skipped by the policy."""
        teacher, steps, moved = self.rooms.teacher, [], False
        work.trained = True
        if work.step < self.config.critic.alone_steps:
            return  # the critic's first steps
        for update in work.updates:
            if not update.has_signal:
                continue
            if teacher is not None and moved:
                teacher.after_optimizer_step()  # after the last one: phase teacher_update
            micros = self.rooms.batcher.pack(update, defaults=teacher.blank if teacher else None)
            for micro in micros if teacher else []:
                micro.teacher_head = teacher.head
            steps.append(self.rooms.policy.train_step(micros, self.rooms.algorithm.loss))
            moved = not steps[-1]["train/skipped"]
            self.rooms.guards.gradient("optim", steps[-1], "train", self.config.train)
            work.moved |= moved
        work.teacher_due = moved
        work.metrics |= _means(steps)
        work.metrics["train/skipped"] = sum(s["train/skipped"] for s in steps)
        # A step whose groups were all filtered out has no update at all, and nothing to learn either.
        work.metrics["train/no_signal"] = float(max(1, len(work.updates)) - len(steps))

    def _teacher_update(self, work: StepWork) -> None:
        from rlpost.assemble import teacher_distance

        if work.teacher_due:
            self.rooms.teacher.after_optimizer_step()
        if work.moved:
            self.rooms.teacher.after_batch()
        work.metrics |= teacher_distance(self.rooms)

    def _publish(self, work: StepWork) -> None:
        if work.moved or not self._serving.still_published(self.step_number + 1):
            work.metrics |= self._serving.publish(self.step_number + 1)

    # What the phases lean on.

    def _evaluate_in_between(self) -> None:
        """An evaluation may be long: a stop request does not wait for another phase after it."""
        self.evaluate()
        with self._guard("evaluate"):
            self._stopping |= self.rooms.agreement.meet(len(self.rooms.machine.phases))[0]

    def _bring_trained(self) -> None:
        self.rooms.machine.bring(*(name for name in TRAINED if name in self.rooms.machine.residents))

    def _heed_guards(self) -> None:
        """Every rank has the same metrics, so all do the same."""
        action = self.config.guards.action
        if action == "off":
            return
        if hint := self.rooms.guards.hint(self.last_metrics):
            self.rooms.observer.say(f"step {self.step_number}: {hint}")
        alarms = self.rooms.guards.check(self.last_metrics)
        for alarm in alarms:
            self.rooms.observer.say(f"step {self.step_number}: {alarm} (guards.action={action})")
        self._stopping |= bool(alarms) and action == "stop"
        if alarms and action == "fallback":
            from rlpost.persist import fall_back

            with self._guard("fall back"):
                self._bring_trained()
                went_back = fall_back(self.rooms, self.step_number)
            self._serving.weights_replaced()
            self._stopping |= not went_back

    def _guard(self, what: str) -> AbstractContextManager[None]:
        return self.rooms.agreement.guard(what, self.step_number)

    def _due(self, every: int) -> bool:
        return every > 0 and self.step_number % every == 0

    def _signals(self) -> StopOnSignal:
        return StopOnSignal(self.rooms.agreement)


def _means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the metrics of a step's updates."""
    return {name: sum(step[name] for step in steps) / len(steps) for name in (steps[0] if steps else ())}
