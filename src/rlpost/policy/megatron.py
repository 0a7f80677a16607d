"""The trained model: Megatron-core behind the `Policy` protocol."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlpost import parallel as ranks
from rlpost.config.schema import ModelConfig, OptimConfig, ParallelConfig
from rlpost.policy.build import build_optimizer
from rlpost.policy.cpu import megatron_device
from rlpost.policy.hf_config import DTYPES
from rlpost.policy.hf_io import SafetensorsReader, warm_page_cache
from rlpost.policy.loss_scale import LossScale
from rlpost.policy.model import MegatronModel
from rlpost.policy.optimizer import GetTensor, MasterShards, learning_rate
from rlpost.policy.overlap import untouched
from rlpost.policy.pool import MetricPool
from rlpost.policy.protocol import StateKind
from rlpost.policy.tokens import LocalTokens
from rlpost.policy.value_head import with_initial_head
from rlpost.residents import Moved
from rlpost.types import LossFn, MicroBatch


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
