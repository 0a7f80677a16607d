"""Self-distillation (SDPO) in one flat loop: no Trainer, no Megatron, no phases, one process.

    python -m rlpost quickstart --dir runs          # once: the rows, and a warm-started model
    python recipes/minimal.py runs/quickstart_seed0

What the library brings here is what surrounds the algorithm: rows to prompts, an engine that samples, the words of
the teacher prompts. The algorithm itself stands below in plain PyTorch: dense logits, one sequence at a time, nothing
packed, chunked or sharded. The tests run this file beside the Trainer and compare losses, so it is also the shortest
description of what the Trainer computes.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.config.compose import files_root
from rlpost.config.schema import DataConfig, RolloutConfig
from rlpost.data.dataset import PromptDataset
from rlpost.feedback import build_feedback
from rlpost.quickstart.task import reward
from rlpost.rollout.engines.torch import TorchEngine
from rlpost.rollout.sampler import Sampler
from rlpost.weights.buckets import iter_buckets

SEED = 0
PROMPTS, SAMPLES, MAX_TOKENS = 16, 4, 8  # of a step; per prompt; of a response
TEMPERATURE = 1.0  # logits are divided by it everywhere: sampling, student, teacher
EMA = 0.01  # the student's share in each update of the teacher


def main(model_path: Path, rows: Path, steps: int = 40, lr: float = 1.5e-3, eps: float = 1e-8) -> list[float]:
    """Train; returns the loss of each step."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    data = PromptDataset(DataConfig(train=str(rows)), tokenizer, seed=SEED)

    # Two copies of the network: the student, which is trained, and the teacher, which slowly follows it.
    student = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=lr, betas=(0.9, 0.95), eps=eps)

    # The engine holds a third copy, made for sampling. It never reads a checkpoint: its weights are what we send.
    engine = TorchEngine(str(model_path), dtype=torch.float32)
    engine.start()
    rollout = RolloutConfig(samples_per_prompt=SAMPLES, max_response_tokens=MAX_TOKENS, temperature=TEMPERATURE)
    sampler = Sampler(engine, tokenizer, rollout, seed=SEED)
    publish(student, engine, version=1)

    # What the teacher reads: the question, and beside it a right answer of a sibling, or what was said of this one.
    words = OmegaConf.to_container(OmegaConf.load(files_root() / "conf" / "feedback" / "quickstart.yaml"))
    feedback = build_feedback(words)
    feedback.bind(tokenizer, seed=SEED)

    losses = []
    for step in range(steps):
        # 1. Rollout: the student answers each prompt several times.
        samples = sampler.sample(data.next_batch(PROMPTS), step)

        # 2. Judge: a score, and in words why it is not higher.
        for sample in samples:
            result = reward(sample)
            sample.reward, sample.feedback, sample.format_ok = result.score, result.feedback, result.format_ok
        feedback.teacher_prompts(samples)  # sets teacher_prompt_ids, and distill_mask: 0 where there is nothing to say

        # 3. Teach and train: the student, under the plain prompt, moves toward what the teacher, under the richer
        #    prompt, would have said at each token of the student's own response.
        #    One denominator for the whole step, counted before it: all response tokens, the untaught ones too.
        tokens = sum(len(sample.response_ids) for sample in samples)
        optimizer.zero_grad()
        total = 0.0
        for sample in samples:
            if sample.distill_mask == 0:
                continue  # it counts in the denominator, and teaches nothing
            with torch.no_grad():
                Q_RV = logprobs(teacher, sample.teacher_prompt_ids, sample.response_ids)
            S_RV = logprobs(student, sample.prompt.ids, sample.response_ids)
            loss = jensen_shannon(S_RV, Q_RV).sum() / tokens
            loss.backward()  # gradients add up over the samples of the step
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()

        # 4. The teacher follows.
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters()):
                slow.lerp_(fast, EMA)

        # 5. Publish: the next rollout is the new student's.
        publish(student, engine, version=step + 2)

        losses.append(total)
        mean = sum(sample.reward for sample in samples) / len(samples)
        print(f"step {step + 1}/{steps}  reward {mean:.3f}  loss {total:.4f}", flush=True)
    engine.close()
    return losses


def logprobs(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    """log-softmax [R, V] at the positions that predict the response: each one before the token itself."""
    logits_TV = model(torch.tensor([prompt + response])).logits[0]
    return (logits_TV[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)


def jensen_shannon(S_RV: torch.Tensor, Q_RV: torch.Tensor) -> torch.Tensor:
    """½·KL(S‖M) + ½·KL(Q‖M) with M = ½(S + Q), per position [R]; the gradient goes through M too."""
    M_RV = torch.logaddexp(S_RV, Q_RV) - torch.log(torch.tensor(2.0))
    return 0.5 * (S_RV.exp() * (S_RV - M_RV) + Q_RV.exp() * (Q_RV - M_RV)).sum(-1)


@torch.no_grad()
def publish(student: torch.nn.Module, engine: TorchEngine, version: int) -> None:
    """All weights, then one commit: an engine never serves a mixture of two versions."""
    engine.pause()
    weights = ((name, parameter.detach()) for name, parameter in student.named_parameters())
    for bucket in iter_buckets(weights, 2**28, lambda name: torch.float32):
        engine.load_bucket(bucket)
    engine.flush()
    engine.commit(version)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    main(folder / "sft" / "export", folder / "data" / "train.jsonl")
