"""The two workers of `peer_trl.py`: rlpost's Trainer and TRL's SDPOTrainer, one step a turn.

Each runs in its own virtual environment as `python peer_trl_workers.py ROLE SPEC.json` and speaks JSON lines:
`ready` once, then one line per `step` that it is asked for on its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TextIO

FEEDBACK = "Your answer has no <answer> tag: give the letter of one option inside <answer> and </answer>."
# The words of conf/feedback/sdpo.yaml, so that the peer's teacher prompts are the same.
DEMONSTRATION = "Here is a response to this question that was judged correct:"
FEEDBACK_HEADER = "An earlier attempt at this question was not accepted. What was said about it:"
INSTRUCTION = "Now answer the original question yourself, in the form that it asks for."


@dataclass(frozen=True)
class Spec:
    """What both workers must do alike."""

    model: str  # directory: config, weights, tokenizer
    rows: str  # JSON lines: row, prompt, system, answer
    steps: int
    prompts: int = 4
    samples: int = 4
    response_tokens: int = 64
    top_k: int = 20
    alpha: float = 0.5  # Jensen-Shannon
    lr: float = 1e-5
    ema: float = 0.01
    threads: int = 2
    micro_batch_tokens: int = 4096  # of rlpost: its default
    peer_micro_batch: int = 16  # sequences in one forward of the peer
    peer_checkpointing: bool = False


def outcome(row: int, index: int) -> tuple[float, str | None]:
    """Reward and feedback of a group's index-th sample. Every second group has two successes, so that each of its
    samples has a demonstration; in the others all fail and are told why. All samples have something to learn."""
    return (1.0, None) if row % 2 == 0 and index < 2 else (0.0, FEEDBACK)


def peak_bytes() -> int:
    """The process's largest resident size so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line")


class Turns:
    """A worker's side of the pipe. Library prints go to stderr: the real stdout carries JSON lines only."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def say(self, **fields: Any) -> None:
        self._out.write(json.dumps(fields) + "\n")

    def wait(self) -> None:
        """Sleep until it is this worker's turn; leave quietly once the driver has gone."""
        if not sys.stdin.readline():
            raise SystemExit(0)


class PhaseTimer:
    """Seconds by phase, measured around the peer's own methods."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def around(self, phase: str | Callable[..., str], call: Callable) -> Callable:
        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                name = phase if isinstance(phase, str) else phase(*args, **kwargs)
                self.seconds[name] += time.perf_counter() - started

        return timed

    def take(self, total: float) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return {**taken, "rest": total - sum(taken.values())}


def work_as_peer(spec: Spec) -> None:
    """TRL's SDPOTrainer; the callback waits for its turn before each step and reports after it."""
    turns = Turns()
    import torch
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    torch.set_num_threads(spec.threads)
    rows = [json.loads(line) for line in Path(spec.rows).read_text(encoding="utf-8").splitlines()]
    dataset = Dataset.from_list(
        [
            {
                "prompt": [{"role": "system", "content": r["system"]}, {"role": "user", "content": r["prompt"]}],
                "privileged_context": FEEDBACK,
                "row": r["row"],
            }
            for r in rows
        ]
    )

    def reward(completions: list, row: list[int], **_: Any) -> list[float]:
        return [outcome(number, i % spec.samples)[0] for i, number in enumerate(row)]

    batch = spec.prompts * spec.samples
    accumulation = batch // spec.peer_micro_batch
    with tempfile.TemporaryDirectory() as output:
        config = SDPOConfig(
            output_dir=output,
            model_init_kwargs={"dtype": "float32"},
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=spec.peer_checkpointing,
            per_device_train_batch_size=spec.peer_micro_batch,
            gradient_accumulation_steps=accumulation,
            max_steps=spec.steps,
            num_generations=spec.samples,
            max_prompt_length=None,
            max_completion_length=spec.response_tokens,
            shuffle_dataset=False,
            temperature=1.0,
            learning_rate=spec.lr,
            lr_scheduler_type="constant",
            distillation_mode="topk_logits",
            distillation_topk=spec.top_k,
            distillation_add_tail=True,
            distillation_alpha=spec.alpha,
            teacher_model_kind="ema",
            teacher_update_rate=spec.ema,
            reprompt_template="{prompt}{solution}{feedback}\n\n" + INSTRUCTION,
            solution_template="\n\n" + DEMONSTRATION + "\n\n{successful_previous_attempt}",
            feedback_template="\n\n" + FEEDBACK_HEADER + "\n\n{feedback_raw}",
            include_environment_feedback=True,
            environment_feedback_only_without_solution=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SDPOTrainer(model=spec.model, reward_funcs=reward, args=config, train_dataset=dataset)
        timer = PhaseTimer()

        def whose(model: Any, *_: Any, **__: Any) -> str:
            return "teacher" if model is trainer.teacher_model else "student forward"

        trainer._generate = timer.around("rollout", trainer._generate)
        trainer._forward_logits = timer.around(whose, trainer._forward_logits)
        trainer.accelerator.backward = timer.around("backward", trainer.accelerator.backward)
        lengths: dict[str, float] = {}

        class TakeTurns(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                turns.wait()
                self.started, self.cpu_started = time.perf_counter(), time.process_time()

            def on_self_distillation_batch_prepared(self, completion_ids, teacher_attention_mask, **kwargs):
                response = completion_ids.shape[1]
                lengths["response_tokens"] = response
                lengths["teacher_prompt_tokens"] = teacher_attention_mask.sum(1).float().mean().item() - response

            def on_pre_optimizer_step(self, args, state, control, **kwargs):
                self.optimizer_started = time.perf_counter()

            def on_step_end(self, args, state, control, **kwargs):
                now = time.perf_counter()
                timer.seconds["optimizer, EMA"] += now - self.optimizer_started
                seconds = now - self.started
                turns.say(
                    seconds=seconds,
                    cpu_seconds=time.process_time() - self.cpu_started,
                    peak_bytes=peak_bytes(),
                    phases=timer.take(seconds),
                    **lengths,
                )

        trainer.add_callback(TakeTurns())  # the last: after TRL's own callback that moves the EMA teacher
        turns.say(ready=f"TRL {trl.__version__}, torch {torch.__version__}", peak_bytes=peak_bytes())
        trainer.train()


def work_as_rlpost(spec: Spec) -> None:
    """rlpost's Trainer, one `step()` a turn."""
    turns = Turns()
    import torch

    import rlpost
    from rlpost.rewards import RewardResult
    from rlpost.trainer import Trainer

    torch.set_num_threads(spec.threads)
    rows = [json.loads(line) for line in Path(spec.rows).read_text(encoding="utf-8").splitlines()]

    def reward(sample: Any) -> RewardResult:
        score, feedback = outcome(sample.prompt.metadata["row"], sample.index)
        return RewardResult(score, feedback=feedback)

    with tempfile.TemporaryDirectory() as output:
        overrides = [
            "algorithm=sdpo",
            "teacher=ema",
            "feedback=sdpo",
            "phases=sdpo",
            f"run.dir={output}",
            f"trainer.steps={spec.steps}",
            "data.shuffle=false",
            "model.dtype=fp32",
            f"rollout.prompts_per_step={spec.prompts}",
            f"rollout.samples_per_prompt={spec.samples}",
            f"rollout.max_response_tokens={spec.response_tokens}",
            f"algorithm.alpha={spec.alpha}",
            "algorithm.mode=topk",
            f"algorithm.top_k={spec.top_k}",
            "algorithm.tail=bucket",
            f"teacher.alpha={spec.ema}",
            f"feedback.templates.truncated='{FEEDBACK}'",  # every response here ends at the length limit
            f"train.max_tokens_per_micro_batch={spec.micro_batch_tokens}",
            f"optim.lr={spec.lr}",
            "tracker.tensorboard=false",
            "tracker.rollouts=false",
            "tracker.progress=false",
        ]
        trainer = Trainer.from_recipe(None, overrides, data=rows, reward=reward, model=spec.model)
        turns.say(ready=f"rlpost {rlpost.__version__}, torch {torch.__version__}", peak_bytes=peak_bytes())
        for _ in range(spec.steps):
            turns.wait()
            started, cpu_started = time.perf_counter(), time.process_time()
            metrics = trainer.step()
            seconds = time.perf_counter() - started
            phases = {
                name.removeprefix("perf/").removesuffix("_s"): value
                for name, value in metrics.items()
                if name.startswith("perf/") and name.endswith("_s") and name not in ("perf/step_s", "perf/tokens_per_s")
            }
            phases["rest"] = seconds - sum(phases.values())
            turns.say(
                seconds=seconds,
                cpu_seconds=time.process_time() - cpu_started,
                peak_bytes=peak_bytes(),
                phases=phases,
                response_tokens=metrics["rollout/response_tokens/mean"],
                teacher_prompt_tokens=metrics["sdpo/teacher_prompt_tokens/mean"],
            )
        trainer.close()


def main() -> None:
    role, spec_path = sys.argv[1:]
    spec = Spec(**json.loads(Path(spec_path).read_text()))
    {"trl": work_as_peer, "rlpost": work_as_rlpost}[role](spec)


if __name__ == "__main__":
    main()
