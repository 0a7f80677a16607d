"""A step needs the memory of one micro-batch, however many it has."""

import weakref

import pytest
import torch
from tiny_models import make_policy, pack, policy_loss, random_sequences, save_model, token_mean
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make, until they are freed; `peak` is the most that lived together."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {id(t.untyped_storage()) for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in known:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage):
        if storage not in self._known:
            size = storage.nbytes()
            self._known[storage] = size
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, size)

    def _free(self, size):
        self.live -= size


def peak_of_a_step(path, micro_batches, loss, recompute):
    policy = make_policy(path, recompute=recompute)
    shares = [random_sequences(i, [(5, 40), (12, 33), (30, 20)]) for i in range(micro_batches)]
    total = token_mean([q for share in shares for q in share])
    micros = [pack(share, total) for share in shares]
    policy.train_step(micros[:1], loss)  # what the first step leaves behind: Adam's moments
    with LiveBytes() as bytes_:
        policy.train_step(micros, loss)
    return bytes_.peak


@pytest.mark.parametrize("kind, recompute", [("qwen3", "none"), ("qwen3-moe", "full")])
def test_peak_memory_is_equal_for_2_and_32_micro_batches(kind, recompute, tmp_path):
    path = save_model(kind, tmp_path)
    two, many = (peak_of_a_step(path, count, policy_loss, recompute) for count in (2, 32))
    assert two > 100_000
    assert many <= 1.001 * two, (two, many)


def test_the_measure_sees_what_a_step_would_keep(tmp_path):
    kept = []

    def keeps_its_graph(head, micro):
        output = policy_loss(head, micro)
        kept.append(output.loss_N)
        return output

    path = save_model("qwen3", tmp_path)
    two, many = (peak_of_a_step(path, count, keeps_its_graph, "none") for count in (2, 32))
    assert many > 1.05 * two, (two, many)
