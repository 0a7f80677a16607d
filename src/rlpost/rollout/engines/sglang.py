"""An SGLang engine beside the trainer, on the same GPU; see `docs/sglang.md`.

The engine lives in child processes of its own (`sglang_host`), is started without a checkpoint (`load_format="dummy"`)
and serves what was published to it: by CUDA IPC on the same GPU, through host memory elsewhere.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist

from rlpost.parallel import all_gather_objects, broadcast_object
from rlpost.rollout.engine import (
    Bucket,
    Completion,
    EngineNotReady,
    PromptScore,
    Request,
    Tag,
    TensorSpec,
)
from rlpost.rollout.engines.expected import bucket_faults, expected_tensors
from rlpost.rollout.engines.host_memory import HostMemory
from rlpost.rollout.engines.sglang_arguments import check_settings, engine_arguments, sampling_params
from rlpost.rollout.engines.sglang_process import EngineProcess, next_process
from rlpost.rollout.engines.state import EngineState, StatedEngine, check_requests, check_scoring

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)

T = TypeVar("T")
Transport = Literal["auto", "ipc", "host"]
CONTROL_S = 300.0  # time limit of every call but generate and score
AWAKE: tuple[Tag, ...] = ("weights", "kv_cache", "cuda_graph")  # what generate and score need


class SGLangEngine(StatedEngine):
    """See `rlpost.rollout.engine.Engine`.

    model_path: a Hugging Face directory (its configuration is read; its weights never are). dtype: of weights and
    activations. tensor_parallel: GPUs of the engine. With more than one, every rank of `group` (by default,
    neighbouring ranks) builds an SGLangEngine and makes every call together with the others; the first one holds the
    processes, and all get the same results and exceptions. memory_fraction: of the device's memory for weights and KV
    cache. max_batch: sequences decoded together. extra: further arguments of SGLang's ServerArgs, which win over those
    set here. seed: of sampling. base_gpu_id: the engine's first GPU, by default LOCAL_RANK. transport: how buckets
    travel; `auto` takes CUDA IPC for a bucket on a GPU, and host memory where sharing it is refused.
    start_timeout_s: for `start`.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: torch.dtype,
        tensor_parallel: int = 1,
        memory_fraction: float = 0.5,
        max_batch: int = 256,
        extra: Mapping[str, Any] | None = None,
        seed: int = 0,
        group: ProcessGroup | None = None,
        base_gpu_id: int | None = None,
        transport: Transport = "auto",
        start_timeout_s: float = 900.0,
    ):
        check_settings(dtype, tensor_parallel, memory_fraction, max_batch, transport)
        self.model_path, self.dtype, self.tensor_parallel = str(model_path), dtype, tensor_parallel
        self.memory_fraction, self.max_batch, self.extra = memory_fraction, max_batch, dict(extra or {})
        self.seed, self.transport, self.start_timeout_s = seed, transport, start_timeout_s
        self.base_gpu_id = int(os.environ.get("LOCAL_RANK", "0")) if base_gpu_id is None else base_gpu_id
        self._group = group
        self._specs = expected_tensors(self.model_path, dtype)
        self._config = _text_config(self.model_path)
        self._process: EngineProcess | None = None
        self._host_memory = HostMemory()
        self._state = EngineState()
        self._loading: Callable[[], Any] | None = None  # waits for the bucket that loads; on the leader
        self._sent: Bucket | None = None  # what the engine may still read, on every rank
        self._proven = False  # that a publish reaches every parameter
        self._aborted = False

    def start(self) -> None:
        with self._state.starting():
            if self._group is None and self.tensor_parallel > 1:
                self._group, _ = dist.new_subgroups(group_size=self.tensor_parallel, backend="gloo")
            if self._group is not None and self._group.size() != self.tensor_parallel:
                raise ValueError(
                    f"engine.tensor_parallel={self.tensor_parallel} but its group has {self._group.size()} ranks"
                )
            self._on_leader(self._start_process)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Raises EngineNotReady where it does not serve, ValueError for a request that the model cannot take.

        `Request.seed` counts only with `extra.enable_deterministic_inference`; otherwise SGLang draws from one
        generator, seeded at the start, and a response depends on what else is in the batch.
        """
        check_requests(requests, self._config.max_position_embeddings)
        _check_stopping(requests)
        with self._state.computing("generate", AWAKE):
            return self._on_leader(self._generate, requests) if requests else []

    def score(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], *, top_k: int = 0, temperature: float = 1.0
    ) -> list[PromptScore]:
        """SGLang scores prompts at temperature 1: ValueError for any other."""
        check_scoring(sequences, starts)
        if temperature != 1.0:
            raise ValueError(
                f"score: temperature={temperature}: SGLang gives log-probs of prompts at temperature 1 only; "
                "score on the trainer instead (teacher.backend=swap)"
            )
        with self._state.computing("score", AWAKE):
            return self._on_leader(self._score, sequences, starts, top_k)

    def sleep(self, tags: Sequence[Tag]) -> None:
        with self._state.falling_asleep(tags):
            self._on_leader(self._call, "release", tags=list(tags))

    def wake(self, tags: Sequence[Tag]) -> None:
        with self._state.waking(tags):
            self._on_leader(self._call, "resume", tags=list(tags))

    def expected_tensors(self) -> dict[str, TensorSpec]:
        return dict(self._specs)

    def pause(self) -> None:
        self._state.pause()
        try:
            self._finish_loading()
        except Exception as error:  # of a publish that was given up: whoever did so knows why
            log.info("the bucket that was loading: %s", error)

    def load_bucket(self, bucket: Bucket) -> None:
        """Where a name, shape or dtype differs on any rank: ValueError on all, and nothing is written.

        Returns while the engine loads it, and when it has the one before; what goes wrong is raised by the next call.
        """
        self._state.check_loading("load_bucket")
        faults = bucket_faults(bucket, self._specs)
        fault, handle = (None, None) if faults else self._share(bucket)
        mine = ([*faults, fault] if fault else faults, handle)
        ranks = all_gather_objects(mine, self._group) if self._group else [mine]
        if faults := list(dict.fromkeys(fault for found, _ in ranks for fault in found)):
            raise ValueError("load_bucket: " + "; ".join(faults))
        if not self._proven and not self._state.arrived:
            self._on_leader(self._hook, "poison")
        handles = [handle for _, handle in ranks]
        self._on_leader(self._load, bucket, None if None in handles else handles)
        self._sent = bucket
        self._state.arrived.update(name for name, _, _ in bucket.entries)

    def flush(self) -> None:
        with self._state.flushing(self._specs.keys()):
            self._on_leader(self._flush)
            self._sent = None
            if not self._proven:
                self._prove()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # memory of sent buckets that the engine has let go

    def commit(self, version: int) -> None:
        with self._state.committing(version):
            self._on_leader(self._hook, "nothing", {"version": version})
            self._proven = True

    def digest(self) -> dict[str, str]:
        self._state.check_readable("digest")
        shapes = {name: spec.shape for name, spec in self._specs.items()}
        return self._on_leader(self._hook, "digests", shapes=shapes)[0]

    def abort(self) -> None:
        if self._process is not None:
            self._aborted = True
            self._call("abort")

    def close(self) -> None:
        """End the engine's processes and no others. Only `start` can follow."""
        self._state.stop()
        self._proven, self._loading, self._sent = False, None, None
        if self._process is not None:
            process, self._process = self._process, None
            process.close()
        self._host_memory.close()

    def _start_process(self) -> None:
        on_gpu = torch.cuda.is_available()
        arguments = {"wanted": engine_arguments(self, on_gpu), "extra": self.extra}
        process = next_process()
        process.start(arguments, timeout_s=self.start_timeout_s)
        self._process = process

    def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        self._aborted = False
        seeded = bool(self.extra.get("enable_deterministic_inference"))
        answers = self._process.call(
            "generate",
            input_ids=[list(request.prompt_ids) for request in requests],
            sampling_params=[sampling_params(r.params, r.seed if seeded else None) for r in requests],
        )
        completions = []
        for i, (ids, logprobs, reason, version, message) in enumerate(answers):
            if reason == "abort" and not self._aborted:
                raise RuntimeError(f"SGLang gave up request {i}: {message or 'no reason given'}")
            completions.append(Completion(ids, logprobs, reason, int(version)))
        return completions

    def _score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int], top_k: int) -> list[PromptScore]:
        scored = [i for i, start in enumerate(starts) if start < len(sequences[i])]
        answers = self._process.call(
            "score",
            input_ids=[list(sequences[i]) for i in scored],
            starts=[starts[i] for i in scored],
            top_k=top_k,
        )
        found = dict(zip(scored, answers))
        nothing = ([], [] if top_k else None, self.version)
        return [_prompt_score(*found.get(i, nothing), top_k) for i in range(len(sequences))]

    def _share(self, bucket: Bucket) -> tuple[str | None, tuple | None]:
        """What forbids sending, and the CUDA IPC arguments of this rank's buffer (None: through host memory)."""
        if self.transport == "host":
            return None, None
        if not bucket.buffer.is_cuda:
            return ("transport=ipc: the bucket is not on a GPU" if self.transport == "ipc" else None), None
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.current_stream(bucket.buffer.device).synchronize()
        try:
            return None, reduce_tensor(bucket.buffer)[1]
        except RuntimeError as error:
            if self.transport == "ipc":
                return f"transport=ipc: {error}", None
            log.warning("CUDA IPC is refused (%s); publishing through host memory from now on", error)
            self.transport = "host"
            return None, None

    def _load(self, bucket: Bucket, handles: list[tuple] | None) -> None:
        self._finish_loading()
        entries = [
            (name, spec.shape, str(spec.dtype).removeprefix("torch."), offset) for name, spec, offset in bucket.entries
        ]
        sent = {"file": self._host_memory.put(bucket.buffer)} if handles is None else {"handles": handles}
        self._loading = self._begin_hook("load", sent, entries=entries, first=not self._state.arrived)

    def _finish_loading(self) -> None:
        if self._loading is not None:
            loaded, self._loading = self._loading, None
            loaded()

    def _flush(self) -> None:
        self._finish_loading()
        self._call("flush")

    def _prove(self) -> None:
        """SGLang skips a name that it does not know with a line in its log, so the first publish is proved."""
        missed = sorted(set().union(*self._on_leader(self._hook, "poisoned")))
        if missed:
            raise EngineNotReady(
                f"the publish did not reach (or brought NaN to) {len(missed)} of SGLang's parameters: {missed[:5]}"
            )

    def _hook(self, command: str, sent: Mapping[str, Any] | None = None, **arguments: Any) -> list[Any]:
        """Run a command of `sglang_worker` in the engine: one result per tensor-parallel rank. sent: what goes with the
        request, see `sglang_host.Host.hook`."""
        return self._begin_hook(command, sent, **arguments)()

    def _begin_hook(
        self, command: str, sent: Mapping[str, Any] | None = None, **arguments: Any
    ) -> Callable[[], list[Any]]:
        """The same in two: what comes back waits for the results."""
        reply = self._process.directory / command
        request = json.dumps({"command": command, "reply": str(reply), **arguments})
        answered = self._process.begin("hook", timeout_s=CONTROL_S, request=request, **(sent or {}))

        def results() -> list[Any]:
            answered()
            found = []
            for rank in range(self._process.info["tensor_parallel"]):
                path = reply.with_name(f"{reply.name}.{rank}")
                answer = json.loads(path.read_text())
                path.unlink()
                if "error" in answer:
                    raise RuntimeError(f"{command} in SGLang's process {rank}: {answer['error']}")
                found.append(answer["result"])
            return found

        return results

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._process.call(method, timeout_s=CONTROL_S, **arguments)

    def _on_leader(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """The leader's result, or its exception, on every rank of the engine."""
        if self._group is None or self._group.size() == 1:
            return function(*arguments, **keywords)
        outcome: tuple[bool, Any] = (False, None)
        if self._group.rank() == 0:
            try:
                outcome = (True, function(*arguments, **keywords))
            except Exception as error:  # raised on all ranks below
                outcome = (False, error)
        succeeded, value = broadcast_object(outcome, dist.get_global_rank(self._group, 0), self._group)
        if not succeeded:
            raise value
        return value


def _prompt_score(
    logprobs: list[float], tops: list[list[tuple[float, int]]] | None, version: int | str, top_k: int
) -> PromptScore:
    score = PromptScore(torch.tensor(logprobs, dtype=torch.float32), version=int(version))
    if tops is not None:
        pairs = torch.tensor(tops, dtype=torch.float64).reshape(len(tops), -1 if tops else top_k, 2)
        score.topk_logprobs, score.topk_ids = pairs[..., 0].float(), pairs[..., 1].long()
    return score


def _check_stopping(requests: Sequence[Request]) -> None:
    for i, request in enumerate(requests):
        if request.params.ignore_eos and request.params.stop_token_ids:
            raise ValueError(f"request {i}: SGLang's ignore_eos drops stop_token_ids too; give one of them")


def _text_config(model_path: str):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_path).get_text_config()
