"""The trained model: Megatron-core behind the `Policy` protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlpost import parallel as ranks
from rlpost.config.schema import ModelConfig, OptimConfig, ParallelConfig
from rlpost.policy.balance import RouterBalance
from rlpost.policy.build import DTYPES, build_model, build_optimizer, make_map, read_config
from rlpost.policy.cpu import megatron_device
from rlpost.policy.hf_io import SafetensorsReader, warm_page_cache
from rlpost.policy.logits import Head
from rlpost.policy.loss_scale import LossScale
from rlpost.policy.optimizer import GetTensor, MasterShards, learning_rate
from rlpost.policy.overlap import finish_gathers, reduce_at_the_last_micro_batch, untouched
from rlpost.policy.pool import MetricPool
from rlpost.policy.protocol import StateKind
from rlpost.policy.tokens import LocalTokens, filler, local_tokens
from rlpost.policy.value_head import ValueHead, with_initial_head
from rlpost.residents import Moved
from rlpost.types import LossFn, MicroBatch

ScoreFn = Callable[[Any, MicroBatch], dict[str, Tensor]]  # of a Head, or of a critic's ValueHead


class MegatronModel:
    """A Hugging Face model on all ranks of the job, as far as scoring needs it. Its weights are not read yet.

    trainable: with gradient buffers beside the weights. seed: of Megatron's random states, None to leave them alone.
    Otherwise as `MegatronPolicy`, and it raises the same.
    """

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        *,
        temperature: float = 1.0,
        trainable: bool = False,
        recompute: str = "none",
        overlap: bool = False,
        seed: int | None = None,
        value_head: bool = False,
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature={temperature}: training needs one above 0")
        self.config, self.temperature = model, temperature
        self.hf_config = read_config(model.path)
        self.mesh = ranks.Mesh.build(parallel)
        self.device, self.has_value_head = ranks.device(), value_head
        self._map = make_map(self.hf_config)
        self._sequence_parallel = parallel.sequence
        with megatron_device():
            if seed is not None:
                random_state = torch.get_rng_state()
                model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
                torch.set_rng_state(random_state)
            kind = {"trainable": trainable, "value_head": value_head, "overlap": overlap}
            chunks = build_model(self.hf_config, model, parallel, recompute, **kind)
            self._chunks = [chunk.to(self.device) for chunk in chunks]
        weights = Moved("the model's weights", lambda: (p for chunk in self._chunks for p in chunk.parameters()))
        self.residents = {"weights": weights}  # what can leave the device
        if overlap:
            reduce_at_the_last_micro_batch(self._chunks)
        self._balance = RouterBalance(model.router_aux_loss, self.mesh) if model.router_aux_loss and trainable else None
        if self._balance:
            for chunk in self._chunks:
                self._balance.watch(chunk)

    def _run(self, micros: Sequence[MicroBatch], reduce: Callable[..., Any], forward_only: bool) -> list[Any]:
        """Megatron's schedule over the micro-batches; `reduce(hidden, tokens, micro)` is the last stage's work on each.

        The results of the last stage's ranks; of the others none.
        """
        self._require("weights")
        if not micros:
            raise ValueError("a step needs at least one micro-batch on every rank; a filler will do")
        fillers = [filler()] * (-len(micros) % self.micro_batch_multiple)
        multiple = self.mesh.tp.size if self._sequence_parallel else 1
        longest = 0
        if len(self._chunks) > 1:
            longest = max(len(local_tokens(micro, self.mesh.cp, multiple).input_ids_T) for micro in micros)
        context_group = self.mesh.cp.group if self.mesh.cp.size > 1 else None

        def forward_step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            micro = next(iterator)
            tokens = local_tokens(micro, self.mesh.cp, multiple, longest)
            if self._balance and not forward_only:
                tokens.balance_BT = self._balance.sequences(tokens, micro, self._sequence_parallel)
            tokens = tokens.to(self.device)

            def collect(hidden: Tensor, non_loss_data: bool = False) -> Any:
                return reduce(hidden, tokens, micro.to(self.device))

            return model.module.forward_packed(tokens, context_group), collect

        iterators = [iter([*micros, *fillers]) for _ in self._chunks]
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks,
            num_microbatches=len(micros) + len(fillers),
            seq_length=longest * self.mesh.cp.size,  # read with virtual stages alone; others tell each other
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results[: len(micros)]

    def _require(self, *names: str) -> None:
        for name in names:
            self.residents[name].require()

    @property
    def transformer_config(self) -> TransformerConfig:
        """Megatron's configuration of this rank's model, resolved."""
        return self._chunks[0].config

    @property
    def micro_batch_multiple(self) -> int:
        """The schedule fills up to a multiple of this number of micro-batches: with virtual stages, the stages."""
        return self.mesh.pp.size if len(self._chunks) > 1 else 1

    def _head(self, hidden: Tensor, tokens: LocalTokens) -> Head | ValueHead:
        """The head over the positions that predict a response token. Prompt tokens cost no logits.

        Each tensor-parallel rank has the logits of its own vocabulary rows, so its gradient with respect to the
        hidden states is a part of the sum: Megatron's two regions add the parts up in the backward. A value head is
        whole on every rank, and so is its gradient.
        """
        vocabulary_cut = not self.has_value_head
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=vocabulary_cut, group=self.mesh.tp.group
            )
        if self.mesh.cp.size > 1:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self.mesh.cp.group
            )
        rows_NH = hidden.squeeze(1).index_select(0, tokens.predict_R)
        if self.has_value_head:
            return ValueHead(rows_NH, self._chunks[-1].module.value_head)
        if not self._sequence_parallel:
            rows_NH = copy_to_tensor_model_parallel_region(rows_NH, group=self.mesh.tp.group)
        return Head(
            rows_NH,
            self.head_weight(),
            temperature=self.temperature,
            vocab_size=self._map.vocab_size,
            tp_group=self.mesh.tp.group if self.mesh.tp.size > 1 else None,
            chunk_tokens=self.config.head_chunk_tokens,
        )

    @torch.no_grad()
    def score(self, micros: Sequence[MicroBatch], fn: ScoreFn) -> list[dict[str, Tensor]]:
        """Forward only; see `Policy.score`. Collective."""
        with megatron_device():
            for chunk in self._chunks:
                chunk.eval()
            results = self._run(micros, partial(self._score_one, fn), forward_only=True)
        pp = self.mesh.pp
        if pp.size == 1:
            return results
        return ranks.broadcast_tensors(results, pp.global_rank(pp.size - 1), pp.group, self.device)

    def _score_one(self, fn: ScoreFn, hidden: Tensor, tokens: LocalTokens, micro: MicroBatch) -> dict[str, Tensor]:
        """fn's results [N, …], on every context rank all of them."""
        if len(micro.target_N) == 0:  # a filler
            return {}
        if tokens.rows_R is None:
            return fn(self._head(hidden, tokens), micro)
        own = len(tokens.rows_R)
        if own == 0:  # a row of another rank tells the names and shapes
            tokens = replace(tokens, rows_R=torch.zeros(1, dtype=torch.int64, device=self.device))
        whole = {}
        for name, value in fn(self._head(hidden, tokens), tokens.losses_of(micro)).items():
            whole[name] = value.new_zeros(len(micro.target_N), *value.shape[1:])
            whole[name][tokens.rows_R[:own]] = value[:own]
            dist.all_reduce(whole[name], group=self.mesh.cp.group)
        return whole

    def head_weight(self) -> Tensor | None:
        """The live output head [padded V / TP, H]; the embedding where they are tied. None but on the last stage."""
        finish_gathers(self._chunks)
        return self._chunks[-1].module.head_weight()

    def weight_bytes(self) -> int:
        """Of this rank's weights in the dtype that they run in."""
        parameters = sum(p.numel() for chunk in self._chunks for p in chunk.module.parameters())
        return parameters * DTYPES[self.config.dtype].itemsize


class MegatronPolicy(MegatronModel):
    """A Hugging Face model trained by Megatron-core on all ranks of the job. Every method that says so is collective.

    Args:
        model: where the weights are and in which dtype they train; masters are fp32 in any case.
        optim: Adam and its schedule.
        parallel: how the ranks are cut; what is left over is data parallel.
        temperature: logits are divided by it before the softmax, in training and scoring.
        total_steps: calls of `train_step` in the run, for schedules that fall towards an end.
        recompute: activations that the backward computes again: none, selective (attention and MLP), full.
        overlap: reduce gradients while the backward runs, and gather weights while the next forward does.
        seed: of Megatron's random states (nothing is drawn from them as long as there is no dropout), and of a new
            value head.
        value_head: a critic, which gives one number for each position (`policy/critic.py`) and has no vocabulary.

    Raises ValueError for a model or a layout that is not supported, FileNotFoundError without weights.
    """

    def __init__(
        self,
        model: ModelConfig,
        optim: OptimConfig,
        parallel: ParallelConfig,
        *,
        temperature: float = 1.0,
        total_steps: int | None = None,
        seed: int = 0,
        recompute: str = "none",
        overlap: bool = False,
        value_head: bool = False,
    ) -> None:
        learning_rate(optim, optim.warmup_steps, total_steps)  # a wrong schedule fails here, not at the first step
        super().__init__(
            model,
            parallel,
            temperature=temperature,
            trainable=True,
            recompute=recompute,
            overlap=overlap,
            seed=seed,
            value_head=value_head,
        )
        self.optim, self.total_steps = optim, total_steps
        self._calls = 0  # of train_step, for the schedule
        self._updates = 0  # those that moved the weights, for Adam's bias correction
        with megatron_device():
            self._optimizer = build_optimizer(self._chunks, optim)
            self._loss_scale = LossScale(self._chunks, optim)
            self._shards = MasterShards(self._chunks, self._optimizer, self._map, self.mesh)
        buffers = [b for chunk in self._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self.residents["gradients"] = Moved("its gradients", lambda: [b.grad_data for b in buffers], keep=False)
        self.residents["optimizer"] = Moved("its optimizer's state", self._shards.state_tensors)
        reader = SafetensorsReader(model.path)
        if model.warm_page_cache:
            warm_page_cache(reader.files)
        self._load_weights(reader, seed)

    def _load_weights(self, reader: SafetensorsReader, seed: int) -> None:
        """Through the masters, so that each data-parallel rank reads only the range that it owns."""
        free = {"lm_head.weight"} if self._map.tied or self.has_value_head else set()  # some hold a tied head twice
        reader.check(self.hf_shapes(), free | ({"score.weight", "score.bias"} if self.has_value_head else set()))
        get = with_initial_head(reader, self.hf_config.hidden_size, seed) if self.has_value_head else reader.get
        self.load_optimizer_tensors("master", get)

    # Training

    def train_step(self, micros: Sequence[MicroBatch], loss: LossFn) -> dict[str, float]:
        """One optimizer step; see `Policy.train_step`. Collective."""
        pool = MetricPool()

        def reduce(hidden: Tensor, tokens: LocalTokens, micro: MicroBatch) -> tuple[Tensor, Tensor, None]:
            micro, head = tokens.losses_of(micro), self._head(hidden, tokens)
            # Where there is nothing to learn every rank runs the same backward yet.
            nothing = 0.0 * head.hidden_NH.sum() + untouched(head.parameters())
            if len(micro.target_N) == 0:
                return nothing, torch.zeros((), dtype=torch.int32), None
            output = loss(head, micro)
            total = (output.loss_N * micro.fields["weights"]).sum()
            if not total.requires_grad:
                total = total + nothing
            live_N = micro.fields["loss_mask"] > 0
            pool.add(total, output.metrics, live_N)
            return total, live_N.sum(dtype=torch.int32), None

        rate = learning_rate(self.optim, self._calls, self.total_steps)
        self._require("gradients")
        with megatron_device():
            for chunk in self._chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            if self._balance:
                self._balance.begin(micros)
            self._run(micros, reduce, forward_only=False)
            with self.residents["optimizer"].borrowed():
                grad_norm, moved = self._update(rate)
        self._calls += 1
        self._updates += moved
        balance = {"router/aux_loss": self._balance.total(self.hf_config.num_hidden_layers)} if self._balance else {}
        return {
            **self._from_last_stage(pool),
            **balance,
            "train/grad_norm": grad_norm,
            "train/lr": rate,
            "train/skipped": float(not moved),
            **self._loss_scale.after_step(moved),
        }

    def _update(self, rate: float) -> tuple[float, bool]:
        """Unscale, clip and step; nothing moves where the gradient norm, which all ranks share, is not finite."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.prepare_grads()
        factor = 1 / self._loss_scale.value
        grad_norm = float(self._optimizer.get_grad_norm()) * factor
        if not math.isfinite(grad_norm):
            return grad_norm, False
        if self.optim.clip_grad > 0:
            factor *= min(1.0, self.optim.clip_grad / (grad_norm + 1e-6))
        if factor < 1:
            parts = self._optimizer.chained_optimizers
            gradients = [p.grad for part in parts for p in part.get_parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, factor)
        self._optimizer.step_with_ready_grads()
        return grad_norm, True

    def _from_last_stage(self, pool: MetricPool) -> dict[str, float]:
        """The pooled metrics on all ranks; only the last stage has seen losses."""
        pp = self.mesh.pp
        pooled = pool.reduced(self.mesh.shard.group) if self.mesh.last_stage else {}
        return ranks.broadcast_object(pooled, pp.global_rank(pp.size - 1), pp.group)

    # Weights

    @torch.no_grad()
    def hf_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Whole weights under their Hugging Face names, one parameter at a time. Collective.

        Tensors may be views of live parameters: copy what must outlive the next step.
        """
        self._require("weights")
        yield from self._shards.weights(dtype or DTYPES[self.config.dtype])

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors that `hf_tensors` yields."""
        return self._shards.hf_shapes()

    def masters(self) -> dict[str, Tensor]:
        """This rank's live flat fp32 master shards by Megatron name."""
        self._require("weights", "optimizer")
        return self._shards.masters()

    def distinct_masters(self) -> set[str]:
        """Names of the masters that this rank counts in a sum over all ranks: every weight is counted once."""
        return self._shards.distinct()

    def sync_from_masters(self) -> None:
        """After masters were written: to the model's parameters, on all ranks. Collective."""
        with megatron_device():
            self._shards.sync()

    def gather_masters(self, shards: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole fp32 tensors under Hugging Face names from shards shaped like `masters()` (an EMA, say). Collective."""
        return self._shards.gather(shards)

    def scatter_masters(self, get: GetTensor) -> dict[str, Tensor]:
        """New shards shaped like `masters()` from whole tensors by Hugging Face name: the inverse of gathering."""
        return self._shards.scatter(get)

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of this rank's weights, gradient buffers, and optimizer state (masters apart from weights, moments)."""
        weights = self.weight_bytes()
        shard = sum(master.numel() for master in self.masters().values())
        low_precision = DTYPES[self.config.dtype] is not torch.float32
        return {
            "weights": weights,
            "gradients": weights // DTYPES[self.config.dtype].itemsize * 4,
            "optimizer": shard * (12 if low_precision else 8),
        }

    # Optimizer state, for checkpoints that any layout can read

    def optimizer_tensors(self, kind: StateKind) -> Iterator[tuple[str, Tensor]]:
        """Masters or Adam moments as whole fp32 tensors under Hugging Face names. Collective."""
        self._require("weights", "optimizer")
        return self._shards.gather(self.masters() if kind == "master" else self._shards.moments(kind))

    def load_optimizer_tensors(self, kind: StateKind, get: GetTensor) -> None:
        """The inverse: this rank's part of the whole tensors that `get` returns. Loading masters changes the model.
        Collective."""
        self._require("weights", "optimizer")
        self._shards.load(kind, get)
        if kind == "master":
            self.sync_from_masters()

    def optimizer_scalars(self) -> dict[str, float]:
        """What the state has beside tensors: `updates` that moved the weights, `calls` of train_step, loss scale."""
        return {"updates": self._updates, "calls": self._calls, **self._loss_scale.state()}

    def load_optimizer_scalars(self, scalars: dict[str, float]) -> None:
        self._loss_scale.load(scalars)
        self._updates, self._calls = scalars["updates"], scalars["calls"]
        self._shards.set_step(self._updates)
