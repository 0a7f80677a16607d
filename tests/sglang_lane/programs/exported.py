"""SGLang loads an export from its directory. argv: the source model's directory, the directory to export to."""

import json
import sys
from pathlib import Path

import sglang
import torch
from common import logprobs_of, reference
from tiny_tokenizer import tiny_tokenizer

from rlpost.weights.export import save_pretrained

PROMPTS = [[5, 9, 200, 31], [7] * 40, list(range(100, 120))]


def main() -> None:
    source, out = sys.argv[1:]
    model = reference(source, seed=3)
    save_pretrained(
        out,
        model.named_parameters(),
        source,
        tiny_tokenizer(),
        torch.float32,
        card={"recipe": "lane"},
        shard_bytes=2**17,
    )
    shards = len(list(Path(out).glob("*.safetensors")))
    engine = sglang.Engine(
        model_path=out,
        dtype="float32",
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        max_total_tokens=4096,
        mem_fraction_static=0.1,
        log_level="warning",
    )
    outputs = engine.generate(
        input_ids=PROMPTS,
        sampling_params={"max_new_tokens": 1, "temperature": 0.0},
        return_logprob=True,
        logprob_start_len=0,
    )
    gap = 0.0
    for prompt, output in zip(PROMPTS, outputs):
        wanted = logprobs_of(model, prompt)[torch.arange(len(prompt) - 1), prompt[1:]]
        found = torch.tensor([entry[0] for entry in output["meta_info"]["input_token_logprobs"][1:]]).double()
        gap = max(gap, (wanted - found).abs().max().item())
    print("MEASURED " + json.dumps({"gap": gap, "shards": shards}), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
