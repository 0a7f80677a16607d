"""The embedded engine: Transformers' model classes, in this process, with the weights that were published to it.

The model is built from its configuration alone and no checkpoint is read, so that what it says is an independent check
of the name map between the trainer and Hugging Face.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from rlpost.rollout.engine import (
    TAGS,
    Bucket,
    Completion,
    EngineNotReady,
    PromptScore,
    Request,
    Tag,
    TensorSpec,
)
from rlpost.rollout.engines.decode import ATTENTION, Decoder, pad_right
from rlpost.rollout.engines.expected import bucket_faults, disk_tensors
from rlpost.rollout.engines.packed import PackedLinear, can_pack, pack_linears, release, restore
from rlpost.weights.buckets import tensor_digest, unpack

# Decoders with full attention and a plain linear head.
MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
SCORE_TOKENS = 8192  # padded tokens of one forward pass of `score`
LOGITS_CHUNK = 2**24  # elements of logits alive at once in `score`


class TorchEngine:
    """See `rlpost.rollout.engine.Engine`.

    The KV cache lives as long as one `generate`, so sleeping it only refuses the next one.

    model_path: a Hugging Face directory or hub id (only its configurations are read). dtype: of weights, activations
    and KV cache. max_batch: sequences decoded together. device: by default the current CUDA device, else the CPU.
    """

    def __init__(self, model_path: str, *, dtype: torch.dtype, max_batch: int = 256, device: str | None = None):
        if max_batch < 1:
            raise ValueError(f"engine.max_batch={max_batch}: at least 1")
        self.config = AutoConfig.from_pretrained(model_path)
        _check_supported(self.config, model_path)
        self.eos_ids = _eos_ids(self.config, model_path)
        self.dtype, self.max_batch = dtype, max_batch
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.version = 0
        self._model: nn.Module | None = None
        self._serving = self._complete = False  # complete: all weights arrived and are packed
        self._asleep: set[Tag] = set()
        self._arrived: set[str] = set()
        self._running = threading.Lock()  # held by whatever computes
        self._abort = threading.Event()

    @property
    def started(self) -> bool:
        return self._model is not None

    @property
    def serving(self) -> bool:
        return self._serving

    def start(self) -> None:
        if self._model is not None:
            raise EngineNotReady("start: the engine runs already")
        with torch.device(self.device), no_init_weights():
            model = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype, attn_implementation=ATTENTION)
        model.tie_weights()
        model.requires_grad_(False).eval()
        self._weights = dict(disk_tensors(model))
        self._specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in self._weights.items()}
        self._linears = pack_linears(model) if can_pack(self.device, self.dtype) else []
        self._model = model

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Raises EngineNotReady where it does not serve, ValueError for a request that the model cannot take."""
        self._check_requests(requests)
        with self._computing("generate", needs=("weights", "kv_cache")):
            if not requests:
                return []
            self._abort.clear()
            decoder = Decoder(self._model, requests, self.eos_ids, self.max_batch)
            decoder.run(self._abort.is_set)
            return decoder.completions(self.version)

    def score(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], *, top_k: int = 0, temperature: float = 1.0
    ) -> list[PromptScore]:
        if len(sequences) != len(starts):
            raise ValueError(f"score: {len(sequences)} sequences but {len(starts)} starts")
        for i, (ids, start) in enumerate(zip(sequences, starts)):
            if not 1 <= start <= len(ids):
                raise ValueError(f"score: start {start} of sequence {i} with {len(ids)} tokens: 1 … {len(ids)}")
        if temperature <= 0:
            raise ValueError(f"score: temperature={temperature}: above 0")
        scores: dict[int, PromptScore] = {}
        with self._computing("score", needs=("weights",)):
            for batch in _batches_by_length([len(ids) for ids in sequences], SCORE_TOKENS):
                hidden = self._hidden_before([sequences[i] for i in batch], [starts[i] for i in batch])
                targets = torch.tensor([t for i in batch for t in sequences[i][starts[i] :]], device=self.device)
                flat = self._score_rows(hidden, targets, top_k, temperature)
                sizes = [len(sequences[i]) - starts[i] for i in batch]
                for i, *tensors in zip(batch, *(t.split(sizes) for t in flat)):
                    scores[i] = PromptScore(*tensors, version=self.version)
        return [scores[i] for i in range(len(sequences))]

    def sleep(self, tags: Sequence[Tag]) -> None:
        self._check_tags(tags, asleep=False)
        if not self._running.acquire(blocking=False):
            raise EngineNotReady("sleep: the engine is computing; drain it first")
        try:
            if "weights" in tags:
                self._give_up_weights()
                for parameter in self._model.parameters():
                    release(parameter)
            self._asleep.update(tags)
        finally:
            self._running.release()

    def wake(self, tags: Sequence[Tag]) -> None:
        self._check_tags(tags, asleep=True)
        if "weights" in tags:
            for parameter in self._model.parameters():
                restore(parameter)
        self._asleep.difference_update(tags)

    def expected_tensors(self) -> dict[str, TensorSpec]:
        self._check_started("expected_tensors")
        return dict(self._specs)

    def pause(self) -> None:
        self._check_started("pause")
        self._serving = False
        with self._running:  # waits for what runs
            if "weights" not in self._asleep:
                self._give_up_weights()

    def load_bucket(self, bucket: Bucket) -> None:
        self._check_loading("load_bucket")
        if faults := bucket_faults(bucket, self._specs):
            raise ValueError("load_bucket: " + "; ".join(faults))
        with torch.no_grad():
            for name, tensor in unpack(bucket):
                self._weights[name].copy_(tensor)
                self._arrived.add(name)

    def flush(self) -> None:
        """Pack the weights. There is no prefix cache: every `generate` computes its prompts anew."""
        self._check_loading("flush")
        if missing := [name for name in self._specs if name not in self._arrived]:
            raise EngineNotReady(
                f"{len(missing)} of {len(self._specs)} tensors have not arrived since pause: {', '.join(missing[:5])}"
            )
        for linear in self._linears:
            linear.pack()
        self._complete = True

    def commit(self, version: int) -> None:
        if not self._complete:
            raise EngineNotReady("commit: flush the loaded weights first")
        self.version = version
        self._serving = True

    def digest(self) -> dict[str, str]:
        self._check_started("digest")
        if "weights" in self._asleep:
            raise EngineNotReady("digest: the weights are asleep")
        modules = self._model.named_modules()
        alone = {f"{n}.weight": m for n, m in modules if isinstance(m, PackedLinear) and not m.shared}
        digests = {}
        for name, weight in self._weights.items():
            linear = alone.get(name)
            # A copy: hashing shares the storage with NumPy, after which `sleep` could not release it.
            digests[name] = tensor_digest(weight.clone() if linear is None else linear.plain_weight())
        return digests

    def abort(self) -> None:
        self._abort.set()

    def close(self) -> None:
        """Give everything back. Only `start` can follow."""
        self.abort()
        self._serving = self._complete = False
        with self._running:
            self._model = None
            self._weights, self._specs, self._linears = {}, {}, []
            self._asleep.clear()

    def _give_up_weights(self) -> None:
        self._serving = self._complete = False
        self._arrived.clear()
        for linear in self._linears:
            linear.unpack()

    def _hidden_before(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """[R, H]: the last hidden state before each scored token, sequence after sequence."""
        hidden_BSH = self._model.base_model(pad_right(sequences, self.device), use_cache=False).last_hidden_state
        return torch.cat([hidden_BSH[b, start - 1 : len(sequences[b]) - 1] for b, start in enumerate(starts)])

    def _score_rows(self, hidden_RH: Tensor, target_R: Tensor, top_k: int, temperature: float) -> list[Tensor]:
        """On the CPU: log-probs [R], and with top_k ids and log-probs [R, K]."""
        head = self._model.get_output_embeddings()
        chunk = max(1, LOGITS_CHUNK // head.weight.shape[0])
        parts = []
        for hidden, target in zip(hidden_RH.split(chunk), target_R.split(chunk)):
            logits = head(hidden).float() / temperature
            total = logits.logsumexp(-1)
            part = [logits.gather(-1, target[:, None])[:, 0] - total]
            if top_k:
                top, ids = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
                part += [ids, top - total[:, None]]
            parts.append([tensor.cpu() for tensor in part])
        return [torch.cat(column) for column in zip(*parts)]

    @contextmanager
    def _computing(self, what: str, needs: tuple[Tag, ...]) -> Iterator[None]:
        with self._running:
            self._check_started(what)
            if asleep := [tag for tag in needs if tag in self._asleep]:
                raise EngineNotReady(f"{what}: {', '.join(asleep)} asleep; wake first")
            if not self._serving:
                why = "its weights were given up by pause or sleep" if self.version else "nothing was published yet"
                raise EngineNotReady(f"{what}: the engine does not serve before the next commit ({why})")
            with torch.inference_mode():
                yield

    def _check_started(self, what: str) -> None:
        if self._model is None:
            raise EngineNotReady(f"{what}: call start() first")

    def _check_loading(self, what: str) -> None:
        self._check_started(what)
        if self._serving or self._complete:
            raise EngineNotReady(f"{what}: the engine holds a whole set of weights; pause it first")
        if "weights" in self._asleep:
            raise EngineNotReady(f"{what}: the weights are asleep; wake them first")

    def _check_tags(self, tags: Sequence[Tag], asleep: bool) -> None:
        self._check_started("wake" if asleep else "sleep")
        for tag in tags:
            if tag not in TAGS:
                raise ValueError(f"engine tag {tag!r}: one of {', '.join(TAGS)}")
            if (tag in self._asleep) != asleep:
                raise EngineNotReady(f"{tag} is {'awake' if asleep else 'asleep'} already")

    def _check_requests(self, requests: Sequence[Request]) -> None:
        limit = self.config.max_position_embeddings
        for i, request in enumerate(requests):
            length = len(request.prompt_ids)
            if length == 0:
                raise ValueError(f"request {i}: the prompt is empty")
            if length + request.params.max_tokens > limit:
                raise ValueError(
                    f"request {i}: {length} prompt tokens and max_tokens={request.params.max_tokens} "
                    f"exceed the model's {limit} positions"
                )


def _batches_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices, the longest first, in batches of at most max_tokens after padding (one sequence at least)."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _check_supported(config, model_path: str) -> None:
    if config.model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ValueError(f"{model_path}: model_type {config.model_type!r}; the torch engine has {known}")
    if other := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise ValueError(f"{model_path}: layer_types {sorted(other)}; the torch engine has full_attention only")


def _eos_ids(config, model_path: str) -> tuple[int, ...]:
    """All end-of-sequence ids of config.json and, where there is one, generation_config.json."""
    sources = [config]
    with suppress(OSError):  # the file is optional
        sources.append(GenerationConfig.from_pretrained(model_path))
    ids: set[int] = set()
    for source in sources:
        eos = source.eos_token_id
        ids.update([eos] if isinstance(eos, int) else eos or ())
    return tuple(sorted(ids))
