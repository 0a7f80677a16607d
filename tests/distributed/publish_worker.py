"""Two ranks publish; rank 1's engine fails once, in the middle, while the policy's gathers go on."""

import os
import sys

import torch
import torch.distributed as dist
from engine_models import hf_tensors, save_engine_model
from launch import say

from rlpost.rollout.engine import EngineNotReady, Request, SamplingParams
from rlpost.rollout.engines.torch import TorchEngine
from rlpost.weights.publish import Publisher, PublishError


class GatheringPolicy:
    """Each tensor takes a collective, as in a tensor-parallel model: rank r holds its rows ≡ r."""

    def __init__(self, model):
        self.model = model

    def hf_tensors(self, dtype=None):
        for name, tensor in hf_tensors(self.model):
            mine = tensor.flatten().clone()
            mine[1 - dist.get_rank() :: 2] = 0
            dist.all_reduce(mine)
            yield name, mine.view(tensor.shape).to(dtype)


class Failing(TorchEngine):
    """Fails at one call of one method."""

    def fail_at(self, method, call):
        original, calls = getattr(self, method), []

        def wrapped(*args):
            calls.append(args)
            if len(calls) == call:
                raise OSError(f"{method} broke")
            return original(*args)

        setattr(self, method, wrapped)


def main(directory: str) -> None:
    rank = int(os.environ["RANK"])
    model = save_engine_model(f"{directory}/{rank}")  # before the group exists: inside one, only rank 0 would write
    dist.init_process_group("gloo")
    engine = Failing(f"{directory}/{rank}", dtype=torch.float32)
    engine.start()
    publisher = Publisher(GatheringPolicy(model), engine, bucket_bytes=2000, verify="first", retries=0)
    publisher.publish()
    request = Request([5, 9, 2], SamplingParams(6), seed=1)
    first = engine.generate([request])[0]
    assert first.version == 1

    for method, call in [("load_bucket", 3), ("flush", 1), ("commit", 1)]:
        if rank == 1:
            engine.fail_at(method, call)
        try:
            publisher.publish()
            raise AssertionError("published")
        except PublishError as error:
            say(f"rank {rank} raised: {error}")
        assert publisher.version == 1
        try:
            engine.generate([request])
            raise AssertionError("a paused engine served")
        except EngineNotReady:
            pass
    publisher.publish()
    again = engine.generate([request])[0]
    assert (again.version, again.ids) == (2, first.ids)
    say(f"rank {rank} recovered at version {publisher.version}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
