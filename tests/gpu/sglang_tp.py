"""Two ranks, one engine with tensor parallelism 2. argv: model directory."""

import os
import sys
import time

import torch
import torch.distributed as dist
from test_sglang import DTYPE, gap, publish
from transformers import AutoConfig, AutoModelForCausalLM

from rlpost.parallel import init_distributed
from rlpost.rollout.engines.sglang import SGLangEngine
from rlpost.weights.buckets import tensor_digest


def main() -> None:
    init_distributed()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]), dtype=DTYPE).cuda().eval()
    engine = SGLangEngine(sys.argv[1], dtype=DTYPE, tensor_parallel=2, memory_fraction=0.3, max_batch=32, base_gpu_id=0)
    engine.start()
    try:
        publish(engine, model, 1)
        seconds = publish(engine, model, 2)
        assert engine.digest() == {name: tensor_digest(parameter) for name, parameter in model.named_parameters()}
        mean, largest = gap(engine, model)
        print(f"rank {os.environ['RANK']}: publish {seconds:.3f} s, |Δ log-prob| mean {mean:.4f}, max {largest:.4f}")
        assert mean < 0.02
        began = time.monotonic()
        engine.sleep(["kv_cache", "weights"])
        engine.wake(["weights"])
        publish(engine, model, 3)
        engine.wake(["kv_cache"])
        assert gap(engine, model)[0] < 0.02
        print(f"rank {os.environ['RANK']}: sleep, wake and publish {time.monotonic() - began:.3f} s")
    finally:
        engine.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
