"""Two ranks under torchrun: one engine for both, then an engine each, whose ranks die of SIGKILL. argv: model."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from common import EXTRA, greedy, publish, reference, running_engine

from rlpost.rollout.engine import Bucket, TensorSpec
from rlpost.rollout.engines.sglang import SGLangEngine
from rlpost.weights.buckets import tensor_digest

PROMPTS = [[5, 9, 200, 31], [7] * 20]


def check_shared_engine(path: str) -> list[list[int]]:
    """Both ranks make every call; the first one has the engine (of one process here: the CPU lane has no TP)."""
    engine = SGLangEngine(
        path, dtype=torch.float32, memory_fraction=0.1, tensor_parallel=2, extra={**EXTRA, "tp_size": 1}
    )
    engine.start()
    assert (engine._process is not None) == (dist.get_rank() == 0)
    model = reference(path, seed=1)
    name, spec = next(iter(engine.expected_tensors().items()))
    engine.pause()
    good = Bucket(torch.zeros(2**18, dtype=torch.uint8), [(name, spec, 0)])
    bad = Bucket(good.buffer, [(name, TensorSpec((1,), spec.dtype), 0)])
    try:
        engine.load_bucket(bad if dist.get_rank() == 1 else good)
    except ValueError as error:
        assert "expected" in str(error)
    else:
        raise AssertionError("the other rank's bad bucket was loaded here")
    publish(engine, model, 1)
    assert engine.digest() == {name: tensor_digest(p) for name, p in model.named_parameters()}
    completions = engine.generate(greedy(PROMPTS, 8))
    assert all(completion.version == 1 for completion in completions)
    engine.close()
    return [completion.ids for completion in completions]


def main() -> None:
    dist.init_process_group("gloo")
    path = sys.argv[1]
    shared = check_shared_engine(path)
    with running_engine(path, seed=dist.get_rank()) as engine:
        publish(engine, reference(path, seed=1), 1)
        mine = [completion.ids for completion in engine.generate(greedy(PROMPTS, 8))]
        everyone = [None, None]
        dist.all_gather_object(everyone, (mine, engine._process.pid))
        assert everyone[0][0] == everyone[1][0] == shared, (everyone, shared)
        assert "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] == str(dist.get_rank())
        if dist.get_rank() == 0:
            print("GROUPS", *(group for _, group in everyone), flush=True)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
