"""`rlpost doctor`: what this machine has for a run, and what to fix."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Literal

from rlpost.observe.progress import human_bytes
from rlpost.weights.checkpoint import versions

# The least that rlpost runs with, as in pyproject.toml.
NEEDED = {
    "torch": "2.11",
    "megatron-core": "0.16.1",
    "transformers": "5.12",
    "hydra-core": "1.3.2",
    "omegaconf": "2.3",
    "safetensors": "0.5",
}
OPTIONAL = {
    "SGLang": ("sglang", "engine.name=sglang"),
    "Transformer Engine": ("transformer_engine.pytorch", "model.impl=transformer_engine"),
}
GIB = 2**30
MEMORY_LEAST, DISK_LEAST, SHARED_LEAST = 2 * GIB, 2 * GIB, 2**28
IMPORT_SECONDS = 120
MASTER_PORT = 29500  # torchrun's, where none is given


@dataclass(frozen=True)
class Finding:
    """state: ok; note: something that a run may lack; broken: runs fail. fix: what a person does about it."""

    what: str
    state: Literal["ok", "note", "broken"]
    text: str
    fix: str = ""


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(
        prog="rlpost doctor", description="What this machine has for a run, and what to fix."
    )
    parser.add_argument(
        "directory", nargs="?", default=os.environ.get("EXP_DIR", "runs"), help="where runs go (default: %(default)s)"
    )
    directory = Path(parser.parse_args(arguments).directory)
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_versions,
        check_devices,
        check_communication,
        check_optional,
        check_memory,
        lambda: check_disk(directory),
        check_ports,
        check_step,
    ]
    findings = []
    for check in checks:
        for finding in check():
            findings.append(finding)
            print(f"{finding.state:7s} {finding.what:20s} {finding.text}", flush=True)
    to_fix = [finding for finding in findings if finding.fix]
    if to_fix:
        print("\nto fix:")
        for finding in sorted(to_fix, key=lambda finding: finding.state != "broken"):
            print(f"  {finding.what} ({finding.state}): {finding.fix}")
    broken = sum(finding.state == "broken" for finding in findings)
    print(f"\n{broken} broken" if broken else "\nready")
    return 1 if broken else 0


def check_versions() -> Iterator[Finding]:
    yield Finding("Python", "ok", platform.python_version())
    found = versions(NEEDED)
    for package, least in NEEDED.items():
        if package not in found:
            yield Finding(package, "broken", "not installed", f"pip install '{package}>={least}'")
        elif _numbers(found[package]) < _numbers(least):
            text = f"{found[package]}, {least} or later is needed"
            yield Finding(package, "broken", text, f"pip install '{package}>={least}'")
        else:
            yield Finding(package, "ok", found[package])


def check_devices() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            yield Finding("devices", "ok", f"{os.cpu_count()} CPU cores (this torch is built without CUDA)")
        else:
            fix = "check nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES, if there should be a GPU"
            yield Finding("devices", "note", f"no GPU, though torch is built with CUDA {torch.version.cuda}", fix)
        return
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        text = f"{torch.cuda.get_device_name(number)}, {human_bytes(free)} of {human_bytes(total)} free"
        if free < total / 2:
            yield Finding(f"GPU {number}", "note", text, "another process holds its memory: see nvidia-smi")
        else:
            yield Finding(f"GPU {number}", "ok", text)


def check_communication() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding("gloo", "broken", "this torch is built without it", "install another build of torch")
    else:
        yield Finding("gloo", "ok", "available")
    if torch.cuda.is_available():
        if dist.is_nccl_available():
            yield Finding("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))
        else:
            yield Finding("NCCL", "broken", "not in this torch", "install a build of torch with NCCL")
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError as error:
        fix = "add the host's name to /etc/hosts, or export GLOO_SOCKET_IFNAME (lo on one machine)"
        yield Finding("host name", "note", f"{socket.gethostname()!r} has no address ({error})", fix)


def check_optional() -> Iterator[Finding]:
    """In processes of their own: an import may print, fork, or end the process."""
    import torch

    for what, (module, setting) in OPTIONAL.items():
        if importlib.util.find_spec(module.split(".")[0]) is None:
            fix = "pip install 'rlpost[gpu]'" if torch.cuda.is_available() else ""
            yield Finding(what, "note", f"not installed; {setting} needs it", fix)
            continue
        try:
            run = subprocess.run(
                [sys.executable, "-c", f"import {module}"],
                capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            yield Finding(what, "broken", f"import {module} takes more than {IMPORT_SECONDS} s", f"reinstall {module}")
            continue
        if run.returncode == 0:
            yield Finding(what, "ok", "can be imported")
        else:
            last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
            yield Finding(what, "broken", f"import {module}: {last}", f"reinstall {module.split('.')[0]}, or remove it")


def check_memory() -> Iterator[Finding]:
    from rlpost.policy.hf_io import available_memory

    available = available_memory()
    text = f"{human_bytes(available)} available"
    if available < MEMORY_LEAST:
        yield Finding("memory", "broken", text, "end what uses it: snapshots and checkpoints lie in host memory")
    else:
        yield Finding("memory", "ok", text)


def check_disk(directory: Path) -> Iterator[Finding]:
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            file.write(b"rlpost")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fix = "give run.dir (or EXP_DIR) a directory that you may write to"
        yield Finding("run directory", "broken", f"{directory} cannot be written: {error.strerror}", fix)
    else:
        yield _space("run directory", existing, DISK_LEAST, "free some: a checkpoint has 16 bytes for each parameter")
    shared = Path("/dev/shm")
    if shared.is_dir():
        fix = "give it more: docker run --shm-size=8g (or --ipc=host); NCCL and SGLang pass data through it"
        yield _space("/dev/shm", shared, SHARED_LEAST, fix)


def _space(what: str, path: Path, least: int, fix: str) -> Finding:
    free = shutil.disk_usage(path).free
    text = f"{path}: {human_bytes(free)} free"
    return Finding(what, "broken", text, fix) if free < least else Finding(what, "ok", text)


def check_ports() -> Iterator[Finding]:
    try:
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
            free = any_port.getsockname()[1]
    except OSError as error:
        yield Finding("ports", "broken", f"none can be bound on 127.0.0.1: {error}", "allow local sockets")
        return
    try:
        with socket.socket() as given:
            given.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            given.bind(("", MASTER_PORT))
    except OSError:
        fix = f"another job has it: torchrun --master-port {free} for a second one"
        yield Finding("ports", "note", f"{MASTER_PORT}, torchrun's own, is taken", fix)
    else:
        yield Finding("ports", "ok", f"{MASTER_PORT} is free")


def check_step() -> Iterator[Finding]:
    """A run of one step: a tiny model samples, is judged, taught, trained, saved and exported."""
    if any(package not in versions(NEEDED) for package in NEEDED):
        return
    said = StringIO()
    with tempfile.TemporaryDirectory(prefix="rlpost-doctor-") as folder:
        try:
            with redirect_stderr(said):
                seconds, loss = _tiny_run(Path(folder))
        except Exception as error:  # whatever a broken installation throws
            last = str(error).strip().splitlines() or [type(error).__name__]
            fix = "every run will meet this: install what rlpost asks for in an environment of its own"
            yield Finding("self-test", "broken", f"{type(error).__name__}: {last[0]}", fix)
        else:
            yield Finding("self-test", "ok", f"a step of training, {seconds:.1f} s, loss {loss:.4f}")


def _tiny_run(folder: Path) -> tuple[float, float]:
    from rlpost.quickstart import task
    from rlpost.trainer import Trainer

    task.write(folder, seed=0)
    logging.getLogger("rlpost").setLevel(logging.ERROR)
    few = ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=2"]
    quiet = [
        "tracker.tensorboard=false",
        "tracker.progress=false",
        "trainer.plots=false",
        "trainer.eval_at_start=false",
    ]
    trainer = Trainer.from_recipe(
        "quickstart_sdpo",
        [f"run.dir={folder}", f"model.path={folder / 'model'}", "~data.eval.held_out", *few, *quiet],
    )
    start = time.perf_counter()
    metrics = trainer.step()
    trainer.save()
    trainer.save_pretrained()
    seconds = time.perf_counter() - start
    trainer.close()
    if not metrics["train/grad_norm"] > 0:
        raise RuntimeError(f"a step of training has gradient norm {metrics['train/grad_norm']}")
    return seconds, metrics["train/loss"]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
