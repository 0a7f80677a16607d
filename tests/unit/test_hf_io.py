import fcntl
import logging
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from rlpost.policy import hf_io
from rlpost.policy.hf_io import SafetensorsReader, available_memory, warm_page_cache, weight_files


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Two files and their index; locks lie beside them."""
    monkeypatch.setattr(hf_io.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(hf_io, "BLOCK", 1000)
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("a", "b"):
        save_file({name: torch.ones(2000)}, directory / f"{name}.safetensors")
    (directory / hf_io.INDEX).write_text('{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}')
    return directory


def test_files_are_those_of_the_index(model):
    assert [file.name for file in weight_files(model)] == ["a.safetensors", "b.safetensors"]
    (model / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names files that are not there: b\.safetensors"):
        weight_files(model)


def test_every_difference_is_named(model):
    reader = SafetensorsReader(model)
    reader.check({"a": (2000,), "b": (2000,)})
    reader.check({"a": (2000,), "c": (1,)}, free={"b", "c"})
    with pytest.raises(ValueError) as caught:
        reader.check({"a": (3,), "c": (1,)})
    for part in ("it lacks c", "it has unknown b", "a is [2000] there and [3] here", str(model)):
        assert part in str(caught.value)


def resident_pages(path):
    """How much of a file the page cache holds, by mincore."""
    import ctypes
    import mmap

    size = os.path.getsize(path)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as view:
        pages = -(-size // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), flags) == 0
        return sum(flag & 1 for flag in flags) / pages


def forget(path):
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_the_files_are_in_memory_after_warming(model):
    files = weight_files(model)
    for file in files:
        forget(file)
    warm_page_cache(files)
    assert all(resident_pages(file) == 1.0 for file in files)


def test_warming_is_best_effort(model, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    files = weight_files(model)
    warm_page_cache(files, limit_s=-1.0)
    assert "warmed in part" in caplog.text
    held = os.open(next(model.parent.glob("rlpost-warm-*.lock")), os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    warm_page_cache(files, limit_s=-1.0)
    assert "another job has been at it" in caplog.text
    os.close(held)
    monkeypatch.setattr(hf_io, "available_memory", lambda: 100)
    warm_page_cache(files)
    assert "more than the free memory" in caplog.text
    shutil.rmtree(model)
    warm_page_cache(files)
    assert "was not warmed: [Errno 2]" in caplog.text


def test_only_one_rank_of_a_node_reads(model, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(hf_io, "_stream", lambda *_: pytest.fail("rank 1 of the node reads"))
    warm_page_cache(weight_files(model))


def test_available_memory_is_some_of_the_machine():
    assert 2**20 < available_memory() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
