"""The embedded engine: Transformers' model classes, in this process, with the weights that were published to it.

The model is built from its configuration alone and no checkpoint is read, so that what it says is an independent check
of the name map between the trainer and Hugging Face.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from rlpost.rollout.engine import Bucket, Completion, PromptScore, Request, Tag, TensorSpec
from rlpost.rollout.engines.decode import Decoder, pad_right
from rlpost.rollout.engines.expected import bucket_faults, disk_tensors
from rlpost.rollout.engines.kv_cache import ATTENTION
from rlpost.rollout.engines.packed import PackedLinear, can_pack, pack_linears, release, restore
from rlpost.rollout.engines.state import EngineState, StatedEngine, check_requests, check_scoring
from rlpost.weights.buckets import tensor_digest, unpack

# Decoders with full attention and a plain linear head.
MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
SCORE_TOKENS = 8192  # padded tokens of one forward pass of `score`
LOGITS_CHUNK = 2**24  # elements of logits alive at once in `score`


class TorchEngine(StatedEngine):
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
        self._model: nn.Module | None = None
        self._state = EngineState()
        self._abort = threading.Event()

    def start(self) -> None:
        with self._state.starting():
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
        check_requests(requests, self.config.max_position_embeddings)
        with self._state.computing("generate", ("weights", "kv_cache")), torch.inference_mode():
            if not requests:
                return []
            self._abort.clear()
            decoder = Decoder(self._model, requests, self.eos_ids, self.max_batch)
            decoder.run(self._abort.is_set)
            return decoder.completions(self.version)

    def score(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], *, top_k: int = 0, temperature: float = 1.0
    ) -> list[PromptScore]:
        check_scoring(sequences, starts)
        if temperature <= 0:
            raise ValueError(f"score: temperature={temperature}: above 0")
        scores: dict[int, PromptScore] = {}
        with self._state.computing("score", ("weights",)), torch.inference_mode():
            for batch in _batches_by_length([len(ids) for ids in sequences], SCORE_TOKENS):
                hidden = self._hidden_before([sequences[i] for i in batch], [starts[i] for i in batch])
                targets = torch.tensor([t for i in batch for t in sequences[i][starts[i] :]], device=self.device)
                flat = self._score_rows(hidden, targets, top_k, temperature)
                sizes = [len(sequences[i]) - starts[i] for i in batch]
                for i, *tensors in zip(batch, *(t.split(sizes) for t in flat)):
                    scores[i] = PromptScore(*tensors, version=self.version)
        return [scores[i] for i in range(len(sequences))]

    def sleep(self, tags: Sequence[Tag]) -> None:
        with self._state.falling_asleep(tags):
            if "weights" in tags:
                self._unpack_linears()
                for parameter in self._model.parameters():
                    release(parameter)

    def wake(self, tags: Sequence[Tag]) -> None:
        with self._state.waking(tags):
            if "weights" in tags:
                for parameter in self._model.parameters():
                    restore(parameter)

    def expected_tensors(self) -> dict[str, TensorSpec]:
        self._state.check_started("expected_tensors")
        return dict(self._specs)

    def pause(self) -> None:
        self._state.pause()
        if "weights" not in self._state.asleep:
            self._unpack_linears()

    def load_bucket(self, bucket: Bucket) -> None:
        self._state.check_loading("load_bucket")
        if faults := bucket_faults(bucket, self._specs):
            raise ValueError("load_bucket: " + "; ".join(faults))
        with torch.no_grad():
            for name, tensor in unpack(bucket):
                self._weights[name].copy_(tensor)
                self._state.arrived.add(name)

    def flush(self) -> None:
        """Pack the weights. There is no prefix cache: every `generate` computes its prompts anew."""
        with self._state.flushing(self._specs.keys()):
            for linear in self._linears:
                linear.pack()

    def commit(self, version: int) -> None:
        with self._state.committing(version):
            pass

    def digest(self) -> dict[str, str]:
        self._state.check_readable("digest")
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
        self._state.stop()
        with self._state.running:
            self._model = None
            self._weights, self._specs, self._linears = {}, {}, []

    def _unpack_linears(self) -> None:
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
