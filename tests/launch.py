"""How tests start programs: one process, or ranks under torchrun, always with a time limit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(**extra: str) -> dict[str, str]:
    """One thread a process (ranks share the cores), no network, no torchrun variables of an outer job. PYTHONPATH has
    the sources, the tests, those of whole runs (recipes name functions there), and last the caller's: SGLang may lie
    there."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    ours = [str(ROOT / folder) for folder in ("src", "tests", "tests/e2e")]
    path = [*ours, *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **extra}


def run_python(
    arguments: Sequence[str], *, timeout: float = 120, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, *arguments], timeout, cwd, env)


def run_ranks(
    arguments: Sequence[str],
    ranks: int,
    *,
    timeout: float = 180,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node ranks arguments…` on a free port."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    return _run([sys.executable, *launcher, *arguments], timeout, cwd, env)


def say(text: str) -> None:
    """A line of a rank in one write. `print` writes its line feed apart, so that lines of two ranks would mix."""
    os.write(1, (text + "\n").encode())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _run(
    command: list[str], timeout: float, cwd: Path | None, env: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment(**(env or {})), cwd=cwd, timeout=timeout, capture_output=True, text=True, check=False
    )
