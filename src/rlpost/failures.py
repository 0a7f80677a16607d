"""What a person reads when a run fails: one sentence, and the file that holds the traceback."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from rlpost.launcher import tell_launcher
from rlpost.observe.progress import human_bytes

# What uses less memory, by the phase in which it ran out.
TRAINING = (
    "lower train.max_tokens_per_micro_batch or model.head_chunk_tokens, set train.recompute=full, "
    "or raise parallel.tensor"
)
SAMPLING = "lower engine.max_batch, rollout.max_response_tokens or engine.memory_fraction"
STARTING = "raise parallel.tensor or parallel.pipeline, set model.dtype=bf16, or take a smaller model"
LOWER = {
    "start": STARTING,
    **dict.fromkeys(("rollout", "evaluate", "generate"), SAMPLING),
    "publish": f"lower publish.bucket_bytes, or {SAMPLING}",
    "judge": "lower reward.workers, or give the reward less to do",
    **dict.fromkeys(("save", "export"), "take more host memory, or set trainer.async_save=false"),
}


class PhaseError(RuntimeError):
    """One rank's failure, raised on every rank. reporter: the rank that tells the person."""

    def __init__(self, rank: int, phase: str, step: int, message: str, reporter: int | None = None):
        self.rank, self.phase, self.step, self.message = rank, phase, step, message
        self.reporter = rank if reporter is None else reporter
        super().__init__(f"rank {rank} failed in phase {phase!r} of step {step}: {message}")

    def encode(self) -> str:
        return json.dumps([self.rank, self.phase, self.step, self.message, self.reporter])

    @classmethod
    def decode(cls, text: str | bytes) -> PhaseError:
        return cls(*json.loads(text))


def sentence(error: BaseException, phase: str, held: Mapping[str, int]) -> str:
    """The failure in words. held: bytes of what the phase keeps in memory, by name."""
    if is_out_of_memory(error):
        return _out_of_memory(error, phase, held)
    message = str(error) or type(error).__name__
    if is_communication(error):
        return f"the other ranks cannot be reached: {message.splitlines()[0]}"
    if not isinstance(error, (ValueError, OSError, RuntimeError)):
        message = f"{type(error).__name__}: {message}"
    return message


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device, or of the host: Python and torch's CPU allocator say it in different ways."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return _says(error, "can't allocate memory", "not enough memory", "Cannot allocate memory")


def is_communication(error: BaseException) -> bool:
    """An error of the process group, as other ranks' deaths cause it."""
    return isinstance(error, dist.DistError) or _says(error, "gloo/", "NCCL", "TCPStore")


def _says(error: BaseException, *words: str) -> bool:
    """Whether it is torch's and has one of them. An error of a class of its own may quote a whole log."""
    return type(error) is RuntimeError and any(word in str(error) for word in words)


def _out_of_memory(error: BaseException, phase: str, held: Mapping[str, int]) -> str:
    where, total = "the host", host_bytes()
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        where, total = "the GPU", torch.cuda.mem_get_info()[1]
    facts = [f"{human_bytes(peak_bytes())} used at the peak, {where} has {human_bytes(total)}"]
    if held:
        facts.append("the phase holds " + ", ".join(f"{name} {human_bytes(count)}" for name, count in held.items()))
    if wanted := re.search(r"[Tt]ried to allocate ([\d.]+) ?(\w*)", str(error)):
        count, unit = wanted.groups()
        facts.insert(0, f"{human_bytes(float(count)) if unit == 'bytes' else f'{count} {unit}'} more wanted")
    return f"out of memory ({'; '.join(facts)}): {LOWER.get(phase, TRAINING)}"


def reset_peak() -> None:
    """`peak_bytes` starts anew on a device; the CPU's knows no way back."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def host_bytes() -> int:
    """Of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_bytes() -> int:
    """In use on this rank's device, by all processes; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def peak_bytes() -> int:
    """The highest memory since `reset_peak`: of this process on the device, or on the CPU since its start."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(error: PhaseError, directory: Path | None) -> None:
    """The traceback to `<run>/log.txt` (of every rank), the sentence to the terminal (from one rank) and to torchrun,
    whose summary ends with it."""
    rank = int(os.environ.get("RANK", 0))
    kept = _keep_traceback(error, rank, directory)
    text = error.message if error.phase == "start" else str(error)
    if error.reporter == rank:
        raised = error.__traceback__ is not None  # by the main thread, not found by the watch-dog
        whole = "".join(traceback.format_exception(error)) if raised and not kept else ""
        where = f"The traceback is in {kept}. " if raised and kept else ""
        intact = "" if error.phase == "start" else "What was saved before is intact."
        # One write: lines of several ranks must not mix.
        sys.stderr.write(f"{whole}\n{text}\n{(where + intact).strip()}\n")
        sys.stderr.flush()
    tell_launcher(text, error.reporter == rank)


def _keep_traceback(error: PhaseError, rank: int, directory: Path | None) -> Path | None:
    """The file, or None where nothing can be written (the disk may be full: that may be the failure)."""
    if directory is None:
        return None
    lines = traceback.format_exception(error)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "log.txt", "a", encoding="utf-8") as log:
            log.write(f"[rank {rank}] {time.strftime('%Y-%m-%d %H:%M:%S')} the run failed\n{''.join(lines)}")
    except OSError:
        return None
    return directory / "log.txt"
