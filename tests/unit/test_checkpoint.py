import json
import random
import resource
import shutil
import signal
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from launch import run_python
from safetensors.torch import load_file, save_file

from rlpost.weights import shards as shards_module
from rlpost.weights.checkpoint import CheckpointError, CheckpointStore
from rlpost.weights.rank_state import rng_state, set_rng_state


def tensors(seed=0.0):
    return {"w": torch.arange(6.0).reshape(2, 3) + seed, "b": torch.full((5,), seed), "empty": torch.zeros(0, 4)}


def kinds(seed=0.0):
    return {
        "master": lambda: iter(tensors(seed).items()),
        "tag.teacher": lambda: ((name, tensor * 2) for name, tensor in tensors(seed).items()),
    }


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def save(store, step, seed=None):
    return store.save(step, kinds(step if seed is None else seed), {"step": step}, {"rng": torch.arange(step)})


def test_what_was_saved_comes_back(store):
    state = {"step": 3, "loss": 0.1 + 0.2, "order": [1, 2], "nested": {"none": None, "text": "ü"}}
    rank_state = {"rng": torch.get_rng_state(), "python": random.getstate(), "buffer": [{"t": torch.ones(2)}]}
    path = store.save(3, kinds(1.5), state, rank_state, config={"optim": {"lr": 1e-6}})
    assert path == store.directory / "step_000003"
    checkpoint = store.load("latest")
    assert (checkpoint.step, checkpoint.world, checkpoint.state) == (3, 1, state)
    assert checkpoint.config == {"optim": {"lr": 1e-6}}
    assert {"rlpost", "torch", "megatron-core", "python"} <= checkpoint.versions.keys()
    assert torch.equal(checkpoint.rank_state["rng"], rank_state["rng"])
    assert checkpoint.rank_state["python"] == rank_state["python"]  # tuples stay tuples
    assert torch.equal(checkpoint.rank_state["buffer"][0]["t"], torch.ones(2))
    assert checkpoint.kinds == ["master", "tag.teacher"]
    for kind, scale in (("master", 1), ("tag.teacher", 2)):
        found = checkpoint.tensors(kind)
        assert list(found) == ["w", "b", "empty"]
        for name, tensor in tensors(1.5).items():
            assert torch.equal(found[name], tensor * scale)


def test_any_reader_of_safetensors_reads_the_files(store):
    path = save(store, 1)
    assert torch.equal(load_file(path / "master-00000.safetensors")["w"], tensors(1)["w"])


def test_large_sets_are_split_and_dtypes_kept(tmp_path):
    many = {f"t{i}": torch.full((10,), i, dtype=dtype) for i, dtype in enumerate(
        [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float16, torch.bool] * 3)}  # fmt: skip
    many["odd"] = torch.zeros(3, dtype=torch.uint8)
    many["after_odd"] = torch.ones(2, dtype=torch.float64)  # must not lie on an odd offset
    many["transposed"] = torch.arange(6.0).reshape(2, 3).T
    many["scalar"] = torch.tensor(3.0)
    store = CheckpointStore(tmp_path, shard_bytes=100)
    path = store.save(1, {"master": lambda: iter(many.items())}, {})
    assert len(list(path.glob("master-*.safetensors"))) > 5
    found = store.load().tensors("master")
    assert list(found) == list(many)
    for name, tensor in many.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_full_header_opens_the_next_file(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "HEADER_BYTES", 1024)
    many = {f"layer.{i}.weight_äöü": torch.tensor([float(i)]) for i in range(40)}
    store = CheckpointStore(tmp_path)
    path = store.save(1, {"master": lambda: iter(many.items())}, {})
    assert len(list(path.glob("master-*"))) > 2
    assert {name: tensor.item() for name, tensor in store.load().tensors("master").items()} == {
        name: tensor.item() for name, tensor in many.items()
    }


def test_only_one_tensor_is_alive_at_a_time(store):
    alive = []

    def stream():
        for i in range(20):
            tensor = torch.ones(1000)
            alive.append(sys.getrefcount(tensor))
            yield f"t{i}", tensor
            assert sys.getrefcount(tensor) <= 5  # the caller's loop, not a list

    store.save(1, {"master": stream}, {})
    assert len(alive) == 20


def test_the_last_ones_stay(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 5, 10):
        save(store, step)
    assert store.steps() == [2, 5, 10] and store.latest() == 10
    assert (tmp_path / "latest").read_text() == "step_000010\n"
    save(store, 6)  # resumed from 5: the later one belongs to a future that was given up
    assert store.steps() == [2, 5, 6] and store.latest() == 6
    assert store.load(2).state == {"step": 2}
    with pytest.raises(CheckpointError, match=r"step_000010 \(others: step 2, 5, 6\): .*there is none"):
        store.load(10)
    with pytest.raises(ValueError, match="keep=0"):
        CheckpointStore(tmp_path, keep=0)


def test_a_step_can_be_saved_again(store):
    save(store, 1, seed=1)
    save(store, 1, seed=2)
    assert store.load().tensors("master")["b"][0] == 2
    assert sorted(path.name for path in store.directory.iterdir()) == ["latest", "step_000001"]


def test_left_overs_of_a_kill_are_swept_up(store):
    save(store, 1)
    (store.directory / "step_000002.tmp").mkdir()
    (store.directory / "step_000002.tmp" / "master-00000.safetensors").write_text("half")
    shutil.copytree(store.directory / "step_000001", store.directory / "step_000001.old")
    assert store.steps() == [1]
    save(store, 2)
    assert sorted(path.name for path in store.directory.iterdir()) == ["latest", "step_000001", "step_000002"]


def test_nothing_saved(store):
    assert store.latest() is None and store.steps() == []
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        store.load()


FILES = ["master-00000.safetensors", "rank_00000.safetensors", "rank_00000.json", "state.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_by_name(store, name):
    path = save(store, 4) / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"{name} has {len(whole) - 1} bytes instead of {len(whole)}"):
        store.load()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{name} has another checksum"):
        store.load()
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        store.load()


def test_a_damaged_manifest_is_refused(store):
    manifest = save(store, 4) / "manifest.json"
    whole = manifest.read_text()
    manifest.write_text(whole[:-5])
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing or damaged"):
        store.load()
    manifest.write_text(json.dumps(json.loads(whole) | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        store.load()


def test_another_model_is_refused_with_what_differs(store):
    save(store, 1)
    expected = {"w": (2, 3), "b": (7,), "head": (1,)}
    with pytest.raises(CheckpointError) as caught:
        store.load().tensors("master", expected)
    for part in ("it lacks head", "it has unknown empty", "b is [5] there and [7] here"):
        assert part in str(caught.value)
    assert len(store.load().tensors("master", {"w": (2, 3), "b": (5,), "empty": (0, 4)})) == 3
    with pytest.raises(CheckpointError, match=r"holds no 'exp_avg'; it holds: master, tag\.teacher"):
        store.load().tensors("exp_avg")
    with pytest.raises(CheckpointError, match="holds no tensor 'head'"):
        store.load().tensors("master")["head"]


def test_what_cannot_be_kept_is_refused_and_the_former_stays(store):
    save(store, 1)
    with pytest.raises(CheckpointError, match=r"rank_state\.model is a Module"):
        store.save(2, kinds(), {}, {"model": torch.nn.Module()})
    with pytest.raises(CheckpointError, match="Object of type Tensor is not JSON"):
        store.save(2, kinds(), {"rng": torch.ones(1)})
    with pytest.raises(ValueError, match="tensor 'w' comes twice"):
        store.save(2, {"master": lambda: iter([("w", torch.ones(1))] * 2)}, {})
    assert store.load().step == 1


def test_rng_state_survives_the_files(store):
    store.save(1, {}, {}, rng_state())
    expected = random.random(), np.random.rand(), torch.rand(3)
    set_rng_state(store.load().rank_state)
    assert (random.random(), np.random.rand()) == expected[:2]
    assert torch.equal(torch.rand(3), expected[2])


def test_no_space_left_keeps_the_former_and_cleans_up(store):
    """A real limit on a file's size: the write comes back short, then fails, as on a full disk."""
    save(store, 1)
    big = {"master": lambda: iter([("w", torch.zeros(50_000)), ("v", torch.zeros(50_000))])}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="step_000002: rank 0: .*File too large"):
            store.save(2, big, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, former)
    assert sorted(path.name for path in store.directory.iterdir()) == ["latest", "step_000001"]
    assert store.load().step == 1


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/checkpoints"):
        save(CheckpointStore(tmp_path / "file" / "checkpoints"), 1)


class Gate:
    """Holds the writer's thread at the first tensor that it writes until the test opens it."""

    def __init__(self, monkeypatch, error=None):
        self.waiting, self._open = threading.Event(), threading.Event()
        append = shards_module._File.append

        def gated(file, tensor, helpers):
            if threading.current_thread() is not threading.main_thread():
                self.waiting.set()
                assert self._open.wait(60)
                if error is not None:
                    raise error
            append(file, tensor, helpers)

        monkeypatch.setattr(shards_module._File, "append", gated)

    def open(self):
        self._open.set()


def test_a_save_in_the_background_keeps_what_was_there_when_it_began(store, monkeypatch):
    save(store, 1)
    gate = Gate(monkeypatch)
    live, state = tensors(2.0), {"step": 2, "order": [1]}
    draws = rng_state()
    store.save(2, {"master": lambda: iter(live.items())}, state, draws, background=True)
    assert gate.waiting.wait(60)
    for tensor in live.values():  # the next step
        tensor.fill_(-1)
    state["order"].append(2)
    draws["torch"].fill_(0)
    store.poll()
    assert store.load("latest").step == 1  # still the former one
    gate.open()
    store.finish()
    assert len(store._host) == len(live)  # the copies' memory, for the next save
    found = store.load("latest")
    assert (found.step, found.state) == (2, {"step": 2, "order": [1]})
    assert found.rank_state["torch"].any()
    assert all(torch.equal(found.tensors("master")[name], tensor) for name, tensor in tensors(2.0).items())
    store.poll()
    store.finish()  # nothing is in flight


def test_one_save_at_a_time_is_in_flight(store, monkeypatch):
    gate = Gate(monkeypatch)
    store.save(1, kinds(1), {"step": 1}, background=True)
    ended = store._in_flight.ended
    wait, waited = ended.wait, []
    monkeypatch.setattr(ended, "wait", lambda: (waited.append(store.steps()), gate.open(), wait()))
    store.save(2, kinds(2), {"step": 2}, background=True)  # waits for the first
    assert waited == [[]]
    assert store.load(1).state == {"step": 1}
    save(store, 3)  # waits for the second, and for itself
    assert store.steps() == [2, 3] and store.latest() == 3


def test_a_failure_in_the_background_is_raised_at_the_next_look_and_the_former_stays(store, monkeypatch):
    save(store, 1)
    gate = Gate(monkeypatch, OSError(28, "No space left on device"))
    store.save(2, kinds(2), {"step": 2}, background=True)
    store.poll()  # not ended yet
    ended = store._in_flight.ended
    gate.open()
    assert ended.wait(60)
    with pytest.raises(CheckpointError, match="step_000002: rank 0: .*No space left on device"):
        store.poll()
    store.poll()  # said once
    assert sorted(path.name for path in store.directory.iterdir()) == ["latest", "step_000001"]
    monkeypatch.undo()
    save(store, 3)
    assert store.latest() == 3


def test_what_cannot_be_kept_is_refused_before_the_thread_starts(store):
    with pytest.raises(CheckpointError, match=r"rank_state\.model is a Module"):
        store.save(2, kinds(), {}, {"model": torch.nn.Module()}, background=True)


KILLED = """
    # Saves steps 1, 2 and 2 again with keep=1 in a fork, killed at its k-th event; then what is left must load.
    import os, shutil, signal, sys, tempfile
    from pathlib import Path
    import torch
    from rlpost.weights.checkpoint import CheckpointStore

    os.fsync = lambda descriptor: None  # a kill does not lose what the kernel has, only a power cut does
    EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "tensor"}

    def tensors(value):
        for i in range(2):
            sys.audit("tensor")
            yield f"t{i}", torch.full((40,), float(value))

    def saves(directory, report):
        store = CheckpointStore(directory, keep=1, shard_bytes=200)
        for value, step in ((1, 1), (2, 2), (3, 2)):
            os.write(report, bytes([2 * value]))  # begun
            kinds = {"master": lambda value=value: tensors(value)}
            store.save(step, kinds, {"value": value}, {"t": torch.tensor(value)}, background=value == 3)
            store.finish()
            os.write(report, bytes([2 * value + 1]))  # done

    def attempt(k, directory):
        reading, report = os.pipe()
        child = os.fork()
        if child == 0:
            seen = 0
            def hook(event, args):
                nonlocal seen
                if event in EVENTS:
                    seen += 1
                    if seen == k:
                        os.kill(os.getpid(), signal.SIGKILL)
            sys.addaudithook(hook)
            saves(directory, report)
            os._exit(0)
        os.close(report)
        _, status = os.waitpid(child, 0)
        return os.WIFEXITED(status), os.read(reading, 100)[-1]

    k, unkilled = 0, False
    while not unkilled:
        k += 1
        directory = Path(tempfile.mkdtemp(dir=sys.argv[1]))
        unkilled, last = attempt(k, directory)
        at_least, at_most = (last - 1) // 2, last // 2
        store = CheckpointStore(directory, keep=1)
        if at_least == 0 and store.latest() is None:
            continue
        checkpoint = store.load("latest")
        value = checkpoint.state["value"]
        assert at_least <= value <= at_most, (k, value, at_least, at_most)
        assert checkpoint.rank_state["t"] == value
        for name, tensor in checkpoint.tensors("master").items():
            assert torch.equal(tensor, torch.full((40,), float(value))), (k, name)
        store.save(9, {}, {"value": 9})
        names = sorted(path.name for path in directory.iterdir())
        shutil.rmtree(directory)
        assert names == ["latest", "step_000009"], (k, names)
    print("killed", k - 1)
"""


def test_a_kill_at_any_moment_leaves_one_that_loads(tmp_path):
    run = run_python(["-c", textwrap.dedent(KILLED), str(tmp_path)])
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[-1]) > 50


def test_save_file_of_the_reference_library_agrees(tmp_path):
    """The streamed files hold what safetensors itself would write."""
    writer = shards_module.ShardWriter(tmp_path)
    for shard, tensor in shards_module.assign_shards("x", tensors(2.0).items(), 10**6):
        writer.put(shard, tensor)
    writer.close()
    assert writer.error is None
    save_file(tensors(2.0), tmp_path / "reference.safetensors")
    ours, theirs = load_file(tmp_path / "x-00000.safetensors"), load_file(tmp_path / "reference.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
