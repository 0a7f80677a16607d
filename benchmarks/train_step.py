"""One training step of a Qwen3 with random weights: rlpost's policy against Transformers, in one run on one GPU.

    python benchmarks/train_step.py [--layers 28] [--sequences 16] [--length 1024]

Both run forward and backward of the same packed tokens in bf16 with the loss on every token. Transformers has dense
logits and SDPA; rlpost's optimizer step is timed apart. Prints time, model FLOP utilisation, peak memory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rlpost.config.schema import ModelConfig, OptimConfig, ParallelConfig
from rlpost.data.packing import pack
from rlpost.losses.reduce import token_weights
from rlpost.parallel import init_distributed
from rlpost.policy.megatron import MegatronPolicy
from rlpost.types import LossOutput, Prompt, Sample

PEAK_TFLOPS = 784.0  # of one H200's bf16 matrix product, as measured


def make_model(folder: Path, layers: int) -> Path:
    """The shape of Qwen3-0.6B."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def make_samples(sequences: int, length: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(sequences):
        ids = torch.randint(0, 151936, (length,), generator=generator).tolist()
        sample = Sample(Prompt(number, [], ids[:1]), group_id=number, index=0, response_ids=ids[1:])
        sample.loss_mask = [1] * (length - 1)
        samples.append(sample)
    for sample, weights in zip(samples, token_weights([s.loss_mask for s in samples], "token_mean")):
        sample.tokens = {"weights": weights, "loss_mask": torch.ones(length - 1)}
    return samples


def median_seconds(step, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[repeats // 2]


def transformers_step(path: Path, samples: list[Sample]):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa").cuda()
    ids = torch.tensor([sample.ids for sample in samples]).cuda()

    def step():
        logits = model(ids, use_cache=False).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()).backward()
        model.zero_grad()

    return step


def rlpost_step(path: Path, samples: list[Sample], impl: str):
    policy = MegatronPolicy(ModelConfig(str(path), dtype="bf16", impl=impl), OptimConfig(lr=1e-6), ParallelConfig())
    micros = [m.to("cuda") for m in pack(samples, sum(len(s.ids) for s in samples))]

    def loss(head, micro):
        return LossOutput(-head.logprobs(micro.target_N).logprobs_N)

    return lambda: policy.train_step(micros, loss)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--impl", nargs="*", default=["local"])
    given = parser.parse_args()
    init_distributed()
    path = make_model(Path(tempfile.mkdtemp()), given.layers)
    samples = make_samples(given.sequences, given.length)
    tokens = given.sequences * given.length
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(path).parameters())
    print(
        f"{torch.cuda.get_device_name()}, {parameters / 1e6:.0f} M parameters, {tokens} packed tokens, V=151936, bf16"
    )
    print("| | ms | MFU | peak GiB |\n| --- | ---: | ---: | ---: |")
    builders = {"Transformers, SDPA, dense logits": lambda: transformers_step(path, samples)}
    builders |= {
        f"rlpost, {impl}, with optimizer step": lambda i=impl: rlpost_step(path, samples, i) for impl in given.impl
    }
    for name, build in builders.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step = build()
        seconds = median_seconds(step)
        peak = torch.cuda.max_memory_allocated() / 2**30
        mfu = 6 * parameters * tokens / seconds / (PEAK_TFLOPS * 1e12)
        print(f"| {name} | {1000 * seconds:.0f} | {mfu:.2f} | {peak:.1f} |", flush=True)
        del step


if __name__ == "__main__":
    main()
