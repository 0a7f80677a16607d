"""Reading Hugging Face safetensors, memory-mapped: a slice of a tensor reads only its own pages."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlpost.parallel import all_gather_objects
from rlpost.weights.shards import tensor_differences

log = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
WARM_SECONDS = 300.0
BLOCK = 16 * 2**20


def weight_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a Hugging Face directory. FileNotFoundError where there are none, or where the index
    names one that is not there; ValueError where there are only pickle files."""
    root = Path(directory)
    if (root / INDEX).is_file():
        names = sorted(set(json.loads((root / INDEX).read_text())["weight_map"].values()))
        missing = [name for name in names if not (root / name).is_file()]
        if missing:
            raise FileNotFoundError(f"{root / INDEX} names files that are not there: {', '.join(missing)}")
        return [root / name for name in names]
    if (root / SINGLE).is_file():
        return [root / SINGLE]
    pickles = sorted(path.name for pattern in PICKLES for path in root.glob(pattern))
    if pickles:
        raise ValueError(
            f"{root} holds its weights as pickle files only ({', '.join(pickles[:3])}), and reading those may run a "
            "stranger's code. rlpost reads safetensors: if you trust the files, load them with Transformers once and "
            "call save_pretrained"
        )
    raise FileNotFoundError(f"{root} holds neither {SINGLE} nor {INDEX}")


class SafetensorsReader:
    """The tensors of a Hugging Face directory by name, of one file or of an indexed set. files: their paths.

    Raises what `weight_files` does, and ValueError for a file that is damaged.
    """

    def __init__(self, directory: str | Path) -> None:
        self.root = Path(directory)
        self.files = weight_files(self.root)
        self._file_of = {}
        for path in self.files:
            try:
                # The mapping of a file stays open as long as the reader lives; no page is read before it is used.
                handle = safe_open(path, framework="pt", device="cpu")
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
            self._file_of.update(dict.fromkeys(handle.keys(), handle))

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def get(self, name: str) -> Tensor:
        """The tensor, a view of the mapped file: do not write to it. Raises KeyError for an unknown name."""
        if name not in self._file_of:
            raise KeyError(f"{self.root} has no tensor {name}")
        return self._file_of[name].get_tensor(name)

    def check(self, expected: Mapping[str, Sequence[int]], free: Collection[str] = ()) -> None:
        """ValueError that lists what differs from the model at hand: tensors that are missing, that it has no place
        for, of another shape. free: names that may be there or not, in any shape."""
        found = {name: handle.get_slice(name).get_shape() for name, handle in self._file_of.items() if name not in free}
        differences = tensor_differences(found, {name: s for name, s in expected.items() if name not in free})
        if differences:
            raise ValueError(f"the tensors of {self.root} are not those of its config.json: {'; '.join(differences)}")


def warm_page_cache(files: Sequence[Path], limit_s: float = WARM_SECONDS) -> None:
    """Stream the files into memory once on each node, so that the ranks' many small reads of a network disk are none.
    Collective: all ranks wait for it.

    Best effort: not where the files are larger than the free memory, not longer than `limit_s`, and a failure is only
    logged. A lock keeps two jobs on one node from reading the same files at the same time.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        try:
            _stream(files, time.monotonic() + limit_s)
        except OSError as error:
            log.info("the page cache was not warmed: %s", error)
    all_gather_objects(None)


def _stream(files: Sequence[Path], deadline: float) -> None:
    size = sum(file.stat().st_size for file in files)
    if size > available_memory():
        log.info("the page cache was not warmed: %d bytes are more than the free memory", size)
        return
    lock = _open_lock(files)
    try:
        while not _locked(lock):
            if time.monotonic() > deadline:
                log.info("the page cache was not warmed: another job has been at it for too long")
                return
            time.sleep(0.2)
        block = bytearray(BLOCK)
        for file in files:
            with open(file, "rb", buffering=0) as stream:
                while stream.readinto(block):
                    if time.monotonic() > deadline:
                        log.info("the page cache was warmed in part: the time limit is over at %s", file)
                        return
    finally:
        os.close(lock)  # the lock goes with it


def _open_lock(files: Sequence[Path]) -> int:
    name = hashlib.sha256("\n".join(str(file.resolve()) for file in files).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"rlpost-warm-{name}.lock"
    try:
        return os.open(path, os.O_RDONLY)  # maybe another user's: a lock needs no right to write
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def available_memory() -> int:
    """Bytes of the host's memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")
