"""The sentences of failures: out of memory, a lost connection, who hangs and who only waits."""

import re
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from rlpost.failures import PhaseError, is_communication, is_out_of_memory, sentence
from rlpost.observe.progress import human_bytes
from rlpost.rollout.engines.sglang_process import EngineDied
from rlpost.watch import verdict, where

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1 GiB is free. "
    "Including non-PyTorch memory, this process has 138.5 GiB memory in use."
)


@pytest.mark.parametrize(
    ("phase", "fields"),
    [
        ("train", "train.max_tokens_per_micro_batch"),
        ("teach", "train.max_tokens_per_micro_batch"),
        ("rollout", "engine.max_batch"),
        ("evaluate", "engine.max_batch"),
        ("publish", "publish.bucket_bytes"),
        ("start", "parallel.tensor"),
        ("save", "trainer.async_save=false"),
    ],
)
def test_out_of_memory_names_numbers_and_the_fields_to_lower(phase, fields):
    said = sentence(torch.OutOfMemoryError(CUDA), phase, {"policy.weights": 3 * 2**30, "policy.optimizer": 512})
    assert re.match(r"out of memory \(2.50 GiB more wanted; [\d.]+ [GM]iB used at the peak, ", said)
    assert "the phase holds policy.weights 3 GiB, policy.optimizer 512 bytes): " in said
    assert fields in said.split("): ")[1]


def test_out_of_memory_is_known_in_all_its_forms():
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**50)
    assert is_out_of_memory(real.value) and is_out_of_memory(MemoryError())
    assert "GiB more wanted" in sentence(real.value, "train", {})
    assert not is_out_of_memory(RuntimeError("the memory of a fish")) and not is_out_of_memory(ValueError("size"))


def test_other_errors_keep_their_words_and_unexpected_ones_their_class():
    assert sentence(ValueError("no such column"), "judge", {}) == "no such column"
    assert sentence(KeyError("x"), "judge", {}) == "KeyError: 'x'"
    assert sentence(RuntimeError(), "judge", {}) == "RuntimeError"
    broken = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer\nmore")
    assert is_communication(broken) and is_communication(dist.DistNetworkError("gone"))
    assert sentence(broken, "train", {}).startswith("the other ranks cannot be reached: [third_party/gloo")
    assert "more" not in sentence(broken, "train", {})


def test_an_engines_last_lines_are_not_taken_for_the_trainers_own_trouble():
    """They name NCCL whenever an engine on a GPU dies."""
    died = EngineDied("the SGLang engine died. Its last lines:\n[W ProcessGroupNCCL.cpp] Cannot allocate memory")
    assert sentence(died, "rollout", {}) == str(died)
    assert not is_communication(died) and not is_out_of_memory(died)


def test_a_failure_travels_between_ranks():
    error = PhaseError(3, "train", 7, "two\nlines \x1f and all", reporter=1)
    there = PhaseError.decode(error.encode())
    assert vars(there) == vars(error) and str(there) == str(error)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (1536, "1.5 KiB"), (3e9, "2.79 GiB"), (1023 * 2**20, "1023 MiB")]
)
def test_sizes(count, text):
    assert human_bytes(count) == text


def test_the_verdict_tells_ranks_that_hang_from_ranks_that_wait():
    waits, loops = (True, "phases.py:1 (meet)"), (False, "mine.py:7 (loop)")
    assert verdict({0: waits, 2: loops, 3: waits}, [1]) == (
        1,
        "rank 1 does not respond; rank 2 is at mine.py:7 (loop); rank 0, 3 only wait for others",
    )
    assert verdict({0: waits, 1: loops}, []) == (1, "rank 1 is at mine.py:7 (loop); rank 0 only waits for others")
    rank, said = verdict({0: waits, 1: (True, "x.py:2 (all_reduce)")}, [])
    assert rank == 0 and said == (
        "all ranks wait for each other: rank 0 at phases.py:1 (meet), rank 1 at x.py:2 (all_reduce)"
    )


def test_a_place_is_outside_of_pythons_own_library():
    ready, release = threading.Event(), threading.Event()

    def stuck():
        ready.set()
        release.wait()

    thread = threading.Thread(target=stuck)
    thread.start()
    ready.wait()
    waits, place = where(sys._current_frames()[thread.ident])
    release.set()
    thread.join()
    assert not waits and re.fullmatch(r"unit/test_failures_in_words.py:\d+ \(stuck\)", place)
