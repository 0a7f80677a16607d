"""The process that owns an SGLang engine: `python -m rlpost.rollout.engines.sglang_host FD PARENT_PID`.

SGLang kills its own process tree when its scheduler fails, kills every child of the calling process when it shuts
down, sets signal handlers and the start method of multiprocessing, binds itself to one event loop, and makes the
processes that it spawns import the main module again. In a process, session and event loop of its own none of that
reaches the trainer. The trainer's end of the pipe is `sglang_process.EngineProcess`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import functools
import importlib.metadata
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

HOOK = "rlpost.rollout.engines.sglang_worker.run"  # runs in every scheduler process (`custom_weight_loader`)
POLL_S = 0.5
DRAIN_S = 120.0
READY = 0  # the id of the first answer: the engine is up, or why not
# One setting, named differently by different releases: the first name that the installed one knows is taken.
RENAMED = {"cuda_graph_max_bs_decode": ("cuda_graph_max_bs_decode", "cuda_graph_max_bs")}
# Settings that save time or avoid collisions where a release has them, and that nothing depends on.
OPTIONAL = ("disable_prefill_cuda_graph", "nccl_port")


class Unserved(RuntimeError):
    """SGLang answered, and said no."""


def server_arguments(wanted: dict[str, Any], extra: dict[str, Any], known: Iterable[str], release: str) -> dict:
    """The keyword arguments for the installed release. ValueError names what it does not know."""
    known = set(known)
    for name in extra:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ValueError(f"engine.extra.{name}: SGLang {release} has no such argument{hint}")
    arguments = {}
    for name, value in wanted.items():
        found = [candidate for candidate in RENAMED.get(name, (name,)) if candidate in known]
        if found:
            arguments[found[0]] = value
        elif name not in OPTIONAL:
            raise ValueError(f"SGLang {release} has no argument {name!r}; rlpost was tested with 0.5.15 to 0.5.18")
    return arguments | extra


class Host:
    """The calls that the trainer may make; each is a coroutine on the engine's own loop."""

    def __init__(self, engine: Any):
        self.engine, self.manager = engine, engine.tokenizer_manager
        self.tensor_parallel = engine.server_args.tp_size

    async def generate(self, input_ids: list[list[int]], sampling_params: list[dict]) -> list[tuple]:
        outputs = await self.engine.async_generate(
            input_ids=input_ids, sampling_params=sampling_params, return_logprob=True
        )
        return [_completion(output) for output in outputs]

    async def score(self, input_ids: list[list[int]], starts: list[int], top_k: int) -> list[tuple]:
        """Per sequence: the log-probs of ids[start:], with top_k the [(log-prob, id), …] of each position, and the
        version of the weights."""
        outputs = await self.engine.async_generate(
            input_ids=input_ids,
            sampling_params={"max_new_tokens": 0, "temperature": 1.0},
            return_logprob=True,
            logprob_start_len=[start - 1 for start in starts],  # the first entry from there is always None
            top_logprobs_num=top_k,
        )
        scores = []
        for output in outputs:
            meta = output["meta_info"]
            logprobs = [entry[0] for entry in meta["input_token_logprobs"][1:]]
            tops = [[pair[:2] for pair in row] for row in meta["input_top_logprobs"][1:]] if top_k else None
            scores.append((logprobs, tops, meta["weight_version"]))
        return scores

    async def hook(
        self,
        request: str,
        file: tuple | None = None,
        handles: list[tuple] | None = None,
        version: int | None = None,
    ) -> None:
        """Run `sglang_worker.run` in every scheduler process; with `version`, SGLang reports that from then on. A
        bucket's buffer goes with the request: `file`, where it is in host memory, as arguments of `torch.from_file`; or
        `handles`, CUDA IPC arguments for each of them."""
        import torch
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        if handles is not None:
            buffers = [_OpenedThere(rebuild_cuda_tensor, arguments) for arguments in handles]
        elif file is not None:
            buffers = [_OpenedThere(functools.partial(torch.from_file, dtype=torch.uint8), file)] * self.tensor_parallel
        else:
            buffers = [torch.empty(0, dtype=torch.uint8)] * self.tensor_parallel
        await self._update([[(request, buffer)] for buffer in buffers], version)

    async def flush(self) -> None:
        """Wait until nothing runs, then drop the prefix cache."""
        result = await self.manager.flush_cache(timeout_s=DRAIN_S)
        if not result.success:
            raise Unserved(f"flush_cache: {result.message or f'still busy after {DRAIN_S:.0f} s'}")

    async def release(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self.flush()  # releasing under a request that still winds down would kill the scheduler
        await self.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)

    async def resume(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)

    async def abort(self) -> None:
        self.manager.abort_request(abort_all=True)

    async def _update(self, payloads: list[Any], version: int | None) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        success, message = await self.manager.update_weights_from_tensor(
            UpdateWeightsFromTensorReqInput(
                # A payload each: shared memory and IPC references are taken over by the rank that reads them.
                serialized_named_tensors=[MultiprocessingSerializer.serialize(payload) for payload in payloads],
                load_format=HOOK,
                flush_cache=False,
                weight_version=None if version is None else str(version),
            ),
            None,
        )
        if not success:
            raise Unserved(f"update_weights_from_tensor: {message}")


class _OpenedThere:
    """Pickles as the tensor that the trainer shares, without opening it in this process."""

    def __init__(self, function: Callable[..., Any], arguments: tuple):
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
        return self.function, self.arguments


def _completion(output: dict) -> tuple[list[int], list[float], str, str, str]:
    meta = output["meta_info"]
    reason = meta["finish_reason"] or {}
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
    ids = list(output.get("output_ids") or [])[: len(logprobs)]
    return ids, logprobs, reason.get("type", "abort"), meta["weight_version"], reason.get("message", "")


def _build(message: dict[str, Any]) -> Any:
    """The engine for {"wanted": …, "extra": …}: what rlpost sets, and what the user adds or overrides."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    wanted = dict(message["wanted"], port=_free_port(), nccl_port=_free_port())
    known = [field.name for field in dataclasses.fields(ServerArgs)]
    release = importlib.metadata.version("sglang")
    return Engine(**server_arguments(wanted, message["extra"], known, release))


def _free_port() -> int:
    """One that leaves room above it: SGLang derives others by adding up to some ten thousand."""
    for port in random.SystemRandom().sample(range(20_000, 45_000), 100):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port among a hundred tried between 20000 and 45000")


def _watch(parent: int, children: Callable[[], list[int]]) -> None:
    """End this process group when the trainer is gone or a process of the engine died."""
    import psutil

    while True:
        if os.getppid() != parent:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        for pid in children():
            if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                print(f"rlpost: SGLang's process {pid} died; ending the engine", file=sys.stderr, flush=True)
                os.killpg(os.getpgrp(), signal.SIGKILL)
        time.sleep(POLL_S)


async def _serve(host: Host, connection: Connection) -> None:
    """Answer calls (id, method, keyword arguments), several at a time, until the trainer hangs up."""
    loop = asyncio.get_running_loop()
    calls: asyncio.Queue = asyncio.Queue()
    sending = threading.Lock()
    tasks: set[asyncio.Task] = set()

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(calls.put_nowait, connection.recv())
        except EOFError:
            loop.call_soon_threadsafe(calls.put_nowait, None)

    async def answer(number: int, method: str, arguments: dict) -> None:
        try:
            reply = (number, True, await getattr(host, method)(**arguments))
        except Exception as error:  # whatever it is, it belongs to the caller
            traceback.print_exc()
            reply = (number, False, _portable(error))
        with sending:
            connection.send(reply)

    threading.Thread(target=read, daemon=True).start()
    while (call := await calls.get()) is not None:
        task = loop.create_task(answer(*call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _portable(error: Exception) -> Exception:
    """An exception that the trainer can unpickle without importing SGLang."""
    if isinstance(error, (ValueError, MemoryError)):
        return type(error)(str(error)) if type(error) in (ValueError, MemoryError) else ValueError(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def main() -> None:
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    pids: list[int] = []
    threading.Thread(target=_watch, args=(parent, lambda: pids), daemon=True).start()
    logging.basicConfig(level=logging.INFO)
    try:
        import sglang.srt.entrypoints.engine  # noqa: F401  (while the trainer is not ready to start an engine)

        engine = _build(connection.recv())
    except Exception as error:  # told to the trainer, which raises it
        traceback.print_exc()
        connection.send((READY, False, _portable(error)))
        os.killpg(os.getpgrp(), signal.SIGKILL)
    pids.extend(engine.get_all_child_pids())
    host = Host(engine)
    info = {"release": importlib.metadata.version("sglang"), "tensor_parallel": host.tensor_parallel}
    connection.send((READY, True, info))
    engine.loop.run_until_complete(_serve(host, connection))
    pids.clear()
    engine.shutdown()


if __name__ == "__main__":
    main()
