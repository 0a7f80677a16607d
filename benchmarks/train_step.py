"""One training step of a model with random weights: rlpost's policy against Transformers on the same GPU.

    python benchmarks/train_step.py --impl local compiled transformer_engine --profile
    torchrun --nproc-per-node 2 benchmarks/train_step.py --impl transformer_engine --parallel tensor=2 sequence=true
    torchrun --nproc-per-node 2 benchmarks/train_step.py --moe --parallel expert=2

All run forward and backward of the same tokens in bf16 with the loss on every token; rlpost's time includes the
optimizer's step. Transformers has dense logits and SDPA, and no optimizer. Prints time, model FLOP utilisation, the
largest peak memory of a rank, and how far the log-probs are from Transformers'.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from models import model_config, write_model
from omegaconf import OmegaConf
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rlpost.config.schema import ModelConfig, OptimConfig, ParallelConfig
from rlpost.data.packing import pack
from rlpost.losses.reduce import token_weights
from rlpost.parallel import init_distributed
from rlpost.policy.megatron import MegatronPolicy
from rlpost.types import LossOutput, Prompt, Sample

PEAK_TFLOPS = 784.0  # of one H200's bf16 matrix product, as measured


def active_parameters(config: PreTrainedConfig, parameters: int) -> int:
    """Those that a token meets."""
    experts = getattr(config, "num_experts", None)
    if experts is None:
        return parameters
    idle = experts - config.num_experts_per_tok
    return parameters - config.num_hidden_layers * idle * 3 * config.hidden_size * config.moe_intermediate_size


def make_samples(sequences: int, length: int, vocabulary: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(sequences):
        ids = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        sample = Sample(Prompt(number, [], ids[:1]), group_id=number, index=0, response_ids=ids[1:])
        sample.loss_mask = [1] * (length - 1)
        samples.append(sample)
    for sample, weights in zip(samples, token_weights([s.loss_mask for s in samples], "token_mean")):
        sample.tokens = {"weights": weights, "loss_mask": torch.ones(length - 1)}
    return samples


def median_seconds(step: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[3:])[repeats // 2]


def transformers_step(model: torch.nn.Module, ids: Tensor) -> Callable[[], None]:
    def step() -> None:
        logits = model(ids, use_cache=False).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()).backward()
        model.zero_grad()

    return step


@torch.no_grad()
def transformers_logprobs(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """[sequences, length − 1], one sequence at a time."""
    rows = []
    for row in ids:
        logits = model(row[None], use_cache=False).logits[0, :-1].float()
        rows.append(logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0])
    return torch.stack(rows)


def rlpost_step(
    path: Path, samples: list[Sample], impl: str, parallel: ParallelConfig, max_tokens: int
) -> tuple[Callable[[], object], Callable[[], dict[int, Tensor]]]:
    """(a training step, the log-probs of this rank's samples by number)"""
    policy = MegatronPolicy(ModelConfig(str(path), dtype="bf16", impl=impl), OptimConfig(lr=1e-6), parallel)
    dp = policy.mesh.dp
    mine = samples[dp.rank :: dp.size]
    micros = pack(mine, max_tokens * policy.mesh.cp.size)

    def loss(head, micro):
        return LossOutput(-head.logprobs(micro.target_N).logprobs_N)

    def logprobs() -> dict[int, Tensor]:
        found = {}
        results = policy.score(micros, lambda head, micro: {"x": head.logprobs(micro.target_N).logprobs_N})
        for micro, result in zip(micros, results):
            for sequence, sample in enumerate(micro.samples):
                found[sample.group_id] = result["x"][micro.sequence_N.to("cuda") == sequence]
        return found

    return lambda: policy.train_step(micros, loss), logprobs


def profile(step: Callable[[], object], rows: int = 25) -> str:
    """Where the GPU's time goes, kernels of one name together."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in profiler.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = sorted((e for e in kernels if "#" not in e.key), key=lambda e: -e.self_device_time_total)
    lines = [f"GPU busy {sum(e.self_device_time_total for e in kernels) / 1e3:.0f} ms"]
    lines += [f"{e.self_device_time_total / 1e3:8.2f} ms × {e.count:4d}  {e.key[:100]}" for e in kernels[:rows]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--impl", nargs="*", default=["local"], choices=["local", "compiled", "transformer_engine"])
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--parallel", nargs="*", default=[], help="tensor=2 sequence=true …")
    given = parser.parse_args()
    init_distributed()
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    parallel = ParallelConfig(**OmegaConf.to_container(OmegaConf.from_dotlist(given.parallel)))
    config = model_config("qwen3-0.6b-moe" if given.moe else "qwen3-0.6b", given.layers)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = Path(folder[0])
    if first:
        write_model(path, config, "cuda")
    dist.barrier()

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    samples = make_samples(given.sequences, given.length, config.vocab_size)
    ids = torch.tensor([sample.ids for sample in samples], device="cuda")
    tokens = ids.numel()
    peer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").cuda()
    active = active_parameters(config, sum(p.numel() for p in peer.parameters()))
    expected = transformers_logprobs(peer, ids)
    say(f"{ranks} × {torch.cuda.get_device_name()}, {' '.join(given.parallel)}")
    say(f"{active / 1e6:.0f} M active parameters, {tokens} packed tokens, V={config.vocab_size}, bf16")
    say("| | ms | MFU | peak GiB | mean \\|Δ log-prob\\| |\n| --- | ---: | ---: | ---: | ---: |")

    def measure(name: str, step: Callable[[], object], gap: float | None, cards: int) -> None:
        torch.cuda.reset_peak_memory_stats()
        seconds = median_seconds(step)
        peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device="cuda")
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        mfu = 6 * active * tokens / seconds / (cards * PEAK_TFLOPS * 1e12)
        difference = "" if gap is None else f"{gap:.4f}"
        say(f"| {name} | {1000 * seconds:.0f} | {mfu:.2f} | {float(peak):.1f} | {difference} |")
        if given.profile:
            say(profile(step))

    if ranks == 1:
        measure("Transformers, SDPA, dense logits, no optimizer", transformers_step(peer, ids), None, 1)
    del peer
    for impl in given.impl:
        gc.collect()
        torch.cuda.empty_cache()
        step, logprobs = rlpost_step(path, samples, impl, parallel, given.micro_tokens)
        gaps = [float((found - expected[number]).abs().mean()) for number, found in logprobs().items()]
        measure(f"rlpost, {impl}", step, sum(gaps) / len(gaps), ranks)
        del step, logprobs


if __name__ == "__main__":
    main()
