"""The trainer's end of an SGLang engine: starts `sglang_host` as a child process, calls it, notices its death."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch

from rlpost.observe.logs import NOTICE
from rlpost.proc import group_is_alive
from rlpost.rollout.engines.sglang_host import READY

log = logging.getLogger(__name__)

# What torchrun tells its workers; the engine's processes would take it for their own.
TORCHRUN = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_\w+|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_\w+|TORCH_NCCL_\w+)"
)
# The allocator's settings are the trainer's: expandable segments and the memory saver exclude each other.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
PROGRESS_S = 10.0
CLOSE_S = 20.0
KILL_S = 10.0  # for the system to take down processes that hold much memory
LAST_LINES = 25
ADVICE = {
    r"architectures .* are not supported|Cannot find model module": (
        "SGLang lacks this architecture; choose another model, or engine.name=torch if it has it"
    ),
    r"[Nn]ot enough memory|(increase|Raise) --mem-fraction-static": (
        "the KV cache does not fit: raise engine.memory_fraction, or free device memory before the engine starts"
    ),
    r"OutOfMemoryError|CUDA out of memory|std::bad_alloc": (
        "out of memory: lower engine.memory_fraction or engine.max_batch, or raise engine.tensor_parallel"
    ),
    r"memory capacity is unbalanced": (
        "another program uses some of the GPUs of this engine: end it, or start with other GPUs (CUDA_VISIBLE_DEVICES)"
    ),
    r"failed to dispatch data type Float": (
        "SGLang's CUDA kernels take bf16 or fp16: set model.dtype=bf16, or engine.dtype=bf16"
    ),
    r"No module named '?(sglang|sgl_kernel|torch_memory_saver)": (
        "a package that SGLang needs is missing: pip install 'rlpost[gpu]'"
    ),
}


class EngineDied(RuntimeError):
    """The engine's processes are gone; its last log lines are in the message."""


class EngineProcess:
    """A `sglang_host`, which imports SGLang and then waits for `start`. Any thread may call it, also inside a running
    event loop.

    Attributes: directory (the log and replies of hooks), log_path, info (release and tensor_parallel of the engine).
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="rlpost-sglang-"))
        self.log_path = self.directory / "log.txt"
        self._connection, theirs = Pipe()
        self._numbers = itertools.count(READY + 1)
        self._ready: Future = Future()
        self._pending = {READY: self._ready}
        self._lock = threading.Lock()  # of sending and of the table of pending calls
        self._started = self._closing = False
        with open(self.log_path, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlpost.rollout.engines.sglang_host", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=engine_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own: Ctrl-C passes it by, and it can be ended as a whole
            )
        theirs.close()
        atexit.register(self.close)
        self._reader = threading.Thread(target=self._read, name="sglang-engine", daemon=True)
        self._reader.start()

    def start(self, arguments: Mapping[str, Any], *, timeout_s: float) -> None:
        """Start the engine and wait until it serves. Raises ValueError for an argument that SGLang refuses, EngineDied
        with its last log lines, TimeoutError after timeout_s seconds."""
        with self._lock:
            self._started = True
            with contextlib.suppress(OSError):  # it died as it imported SGLang, which the wait will say
                self._connection.send(dict(arguments))
        try:
            self.info: dict[str, Any] = self._wait_until_ready(timeout_s)
        except BaseException:
            self.close(keep_log=True)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, method: str, *, timeout_s: float | None = None, **arguments: Any) -> Any:
        """The result of this method of `sglang_host.Host`, or its exception."""
        return self.begin(method, timeout_s=timeout_s, **arguments)()

    def begin(self, method: str, *, timeout_s: float | None = None, **arguments: Any) -> Callable[[], Any]:
        """The same in two: what comes back waits for the result."""
        answer: Future = Future()
        with self._lock:
            if not self.alive or self._closing:
                raise self._death()
            number = next(self._numbers)
            self._pending[number] = answer
            try:
                self._connection.send((number, method, arguments))
            except OSError as error:
                raise self._death() from error

        def result() -> Any:
            try:
                return answer.result(timeout_s)
            except TimeoutError as error:
                if answer.done():
                    raise  # the engine's own
                raise TimeoutError(f"the SGLang engine did not answer {method!r} within {timeout_s} s") from error

        return result

    def close(self, *, keep_log: bool = False) -> None:
        """End the engine's processes and no others. May be called again."""
        atexit.unregister(self.close)
        self._closing = True
        if self._started and not keep_log and self.alive:
            self._hang_up()
        self._kill_group()
        self._reader.join()
        self._connection.close()
        self._fail_pending()
        if not keep_log and (self._process.returncode == 0 or not self._started):
            shutil.rmtree(self.directory, ignore_errors=True)

    def _hang_up(self) -> None:
        """Ask the engine to end, and wait until it has given its memory back."""
        try:
            with self._lock:
                self._connection.send(None)
            self._process.wait(CLOSE_S)
        except BrokenPipeError:
            pass  # it died a moment ago
        except subprocess.TimeoutExpired:
            log.warning("the SGLang engine did not end within %.0f s; killing it", CLOSE_S)

    def _kill_group(self) -> None:
        """Returns when the processes are gone, and with them what they held of the GPU."""
        with contextlib.suppress(ProcessLookupError):  # nothing is left of it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        until = time.monotonic() + KILL_S
        while group_is_alive(self._process.pid) and time.monotonic() < until:
            time.sleep(0.02)

    def _read(self) -> None:
        """Hand answers to their callers; when the engine dies, an EngineDied to all of them."""
        while True:
            try:
                if not self._connection.poll(1.0):
                    if self.alive:
                        continue
                    break
                number, succeeded, value = self._connection.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                answer = self._pending.pop(number)
            if succeeded:
                answer.set_result(value)
            else:
                answer.set_exception(value)
        if not self._closing:
            self._kill_group()
            self._fail_pending()

    def _fail_pending(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        for answer in pending.values():
            answer.set_exception(self._death())

    def _wait_until_ready(self, timeout_s: float) -> dict[str, Any]:
        start = time.monotonic()
        while True:
            elapsed = time.monotonic() - start
            try:
                info = self._ready.result(min(PROGRESS_S, max(0.0, timeout_s - elapsed)))
            except TimeoutError:
                if self._ready.done():
                    raise
                elapsed = time.monotonic() - start
                if elapsed >= timeout_s:
                    raise TimeoutError(
                        f"the SGLang engine did not start within {timeout_s:.0f} s{self._tail()}"
                    ) from None
                last = (self._lines() or ["no output yet"])[-1]
                log.log(NOTICE, "SGLang engine starting, %.0f s: %s", elapsed, last[:200])
            except EngineDied:
                raise
            except RuntimeError as error:
                raise EngineDied(f"the SGLang engine did not start ({error}){self._tail()}") from error
            else:
                log.log(NOTICE, "SGLang %s serves after %.1f s", info["release"], time.monotonic() - start)
                return info

    def _death(self) -> EngineDied:
        if self._closing and self._process.returncode == 0:
            return EngineDied("the SGLang engine was closed")
        return EngineDied(f"the SGLang engine died (exit status {self._process.poll()}){self._tail()}")

    def _lines(self) -> list[str]:
        try:
            text = self.log_path.read_text(errors="replace")
        except FileNotFoundError:
            return []
        lines = (line.rstrip() for line in text.splitlines())
        return [line for line in lines if line and "Ignore import error when loading" not in line]

    def _tail(self) -> str:
        lines = self._lines()
        advice = advice_on("\n".join(lines))
        return f"{f': {advice}' if advice else ''}. Log: {self.log_path}; its last lines:\n" + "\n".join(
            lines[-LAST_LINES:]
        )


_waiting: list[EngineProcess] = []


def prestart(count: int) -> None:
    """Let `count` processes import SGLang, which takes 10 to 30 s, while the trainer imports and loads its own. The
    next engines to start take them."""
    while len(_waiting) < count:
        _waiting.append(EngineProcess())


def next_process() -> EngineProcess:
    """One that imports SGLang already, or a new one."""
    while _waiting:
        process = _waiting.pop(0)
        if process.alive:
            return process
        process.close()
    return EngineProcess()


def advice_on(output: str) -> str | None:
    """What to change, where the engine's output shows a known cause."""
    return next((advice for pattern, advice in ADVICE.items() if re.search(pattern, output)), None)


def engine_environment() -> dict[str, str]:
    """This process's environment without torchrun's variables, with rlpost importable; without a GPU, SGLang's word
    for the CPU."""
    kept = {k: v for k, v in os.environ.items() if not TORCHRUN.fullmatch(k) and k not in ALLOCATOR}
    source = str(Path(__file__).parents[3])
    kept["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [kept.get("PYTHONPATH")])])
    return kept if torch.cuda.is_available() else {**kept, "SGLANG_USE_CPU_ENGINE": "1"}
