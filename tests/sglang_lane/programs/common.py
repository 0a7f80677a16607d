"""What the programs of the lane share: tiny models, Transformers as the oracle, publishing by hand."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlpost.rollout.engine import Request, SamplingParams
from rlpost.rollout.engines.expected import disk_tensors
from rlpost.rollout.engines.sglang import SGLangEngine
from rlpost.weights.buckets import iter_buckets

torch.set_num_threads(1)
logging.basicConfig(level=logging.INFO)

EXTRA = {"max_total_tokens": 4096}


def reference(path: str, seed: int) -> torch.nn.Module:
    """A Transformers model of this configuration whose weights give peaked distributions."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model.eval()


@contextmanager
def running_engine(path: str, **settings) -> Iterator[SGLangEngine]:
    engine = SGLangEngine(path, dtype=torch.float32, memory_fraction=0.1, max_batch=16, extra=EXTRA, **settings)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def publish(engine: SGLangEngine, model: torch.nn.Module, version: int, bucket_bytes: int = 2**16) -> None:
    engine.pause()
    for bucket in iter_buckets(disk_tensors(model), bucket_bytes, lambda name: torch.float32):
        engine.load_bucket(bucket)
    engine.flush()
    engine.commit(version)


def greedy(prompts: list[list[int]], max_tokens: int) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [Request(prompt, params, seed=0) for prompt in prompts]


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, ids: list[int], temperature: float = 1.0) -> Tensor:
    """[len(ids) − 1, V]: row i is the distribution of ids[i + 1]."""
    logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return (logits / temperature).log_softmax(-1)


def alive(process_group: int) -> bool:
    """Whether anything but zombies is left of the group."""
    import psutil

    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == process_group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
        except ProcessLookupError:
            continue
    return False


def kill_scheduler(engine: SGLangEngine) -> None:
    """SIGKILL to the process that computes."""
    import psutil

    children = psutil.Process(engine._process.pid).children(recursive=True)
    scheduler = max(children, key=lambda child: child.memory_info().rss)
    os.kill(scheduler.pid, signal.SIGKILL)
