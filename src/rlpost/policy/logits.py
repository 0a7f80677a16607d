"""The output head, streamed: log-probs, top-k, entropy and divergences without ever storing [tokens, vocabulary].

Logits live one tile at a time; the backward recomputes them from the saved hidden states and log-normalisers and
uses the closed form of each gradient.

Shapes: N response tokens, H hidden, V this rank's vocabulary rows (a shard of the padded vocabulary under tensor
parallelism), K top-k, M picked ids. Everything returned is fp32 (fp64 where the weight is).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlpost.policy.tiles import Projection, fused, statistics, stream_backward, take, tile_elements, touched_rows

if TYPE_CHECKING:
    from rlpost.types import MicroBatch


@dataclass
class HeadOutput:
    """What `Head.logprobs` returns, differentiable except the ids and `lse_N`. None where it was not asked for."""

    logprobs_N: Tensor
    lse_N: Tensor  # log-normaliser of logits / temperature over the whole vocabulary, detached
    topk_ids_NK: Tensor | None = None  # int64, most likely first
    topk_logprobs_NK: Tensor | None = None  # normalised over the whole vocabulary
    extra_logprobs_NK: Tensor | None = None
    entropy_N: Tensor | None = None  # nats, exact over the whole vocabulary


class Head(Projection):
    """The trained model's output head over the N positions that predict response tokens.

    hidden_NH: final hidden states; weight_VH: the (local shard of the) output head, possibly padded behind
    `vocab_size`. Under tensor parallelism every rank holds the same hidden states and calls with the same arguments;
    the gradient of hidden is this shard's *part*, to be summed by the caller's copy region (Megatron's
    `copy_to_tensor_model_parallel_region`). chunk_tokens: rows of full logits alive at once, 0 = chosen here.
    """

    def parameters(self) -> list[Tensor]:
        return [self.weight_VH]

    def beside(self, hidden_NH: Tensor, weight_VH: Tensor, *, temperature: float | None = None) -> Head:
        """Another head over the same vocabulary and ranks. temperature: of its own, by default this one's."""
        return Head(
            hidden_NH,
            weight_VH,
            temperature=self.temperature if temperature is None else temperature,
            vocab_size=self.vocab_size,
            tp_group=self.tp_group,
            chunk_tokens=self.chunk_tokens,
            skip_rows=self.skip_rows,
        )

    def logprobs(
        self, ids_N: Tensor, *, top_k: int = 0, extra_ids_NK: Tensor | None = None, entropy: bool = False
    ) -> HeadOutput:
        """One pass over the logits: log-probs of `ids_N` [N] and of `extra_ids_NK` [N, K] (global ids), the `top_k`
        most likely ids with theirs, the entropy. Nothing is saved for the backward under `torch.no_grad`."""
        if not 0 <= top_k <= self.vocab_size:
            raise ValueError(f"top_k={top_k}: must be 0 … {self.vocab_size}, the vocabulary")
        ids_NM = ids_N[:, None] if extra_ids_NK is None else torch.cat([ids_N[:, None], extra_ids_NK], dim=1)
        if ids_NM.numel() and not ids_NM.is_cuda:  # a GPU's earlier work would be waited for
            low, high = (int(x) for x in ids_NM.aminmax())
            if low < 0 or high >= self.vocab_size:
                raise ValueError(f"token ids {low} … {high}: must lie in 0 … {self.vocab_size - 1}, the vocabulary")
        picked_NM, topk_NK, entropy_N, topk_ids_NK, lse_N = _LogProbs.apply(
            self.hidden_NH, self.weight_VH, self, ids_NM, top_k, entropy
        )
        self.lse_N = lse_N
        return HeadOutput(
            logprobs_N=picked_NM[:, 0],
            lse_N=lse_N,
            topk_ids_NK=topk_ids_NK,
            topk_logprobs_NK=topk_NK,
            extra_logprobs_NK=None if extra_ids_NK is None else picked_NM[:, 1:],
            entropy_N=entropy_N,
        )

    def divergence(self, teacher: HiddenTargets, alpha: float) -> tuple[Tensor, Tensor]:
        """Full-vocabulary divergence from a teacher kept as hidden states: (divergence_N, kl_N).

        alpha 0: KL(teacher‖student); 1: KL(student‖teacher); between: the Jensen-Shannon divergence of
        M = (1−α)·student + α·teacher. kl_N is KL(teacher‖student), detached, for the metrics. Differentiable in
        the student alone.
        """
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha={alpha}: must be 0 … 1")
        if teacher.weight_VH.shape[0] != self.weight_VH.shape[0] or teacher.vocab_size != self.vocab_size:
            raise ValueError(
                f"teacher head {tuple(teacher.weight_VH.shape)} with vocabulary {teacher.vocab_size}, student head "
                f"{tuple(self.weight_VH.shape)} with {self.vocab_size}: must have the same vocabulary"
            )
        return _Divergence.apply(self.hidden_NH, self.weight_VH, self, teacher, float(alpha), self.lse_N)

    @cached_property
    def lse_N(self) -> Tensor:
        with torch.no_grad():
            return statistics(self, None, 0, entropy=False).lse_N


@dataclass
class HiddenTargets:
    """A teacher kept as its final hidden states and its head: exact log-probs of any ids, or of the whole
    vocabulary, for [N, H] of memory instead of [N, V]."""

    hidden_NH: Tensor
    lse_N: Tensor  # log-normalisers of logits / temperature, as `HeadOutput.lse_N`
    weight_VH: Tensor  # the teacher's local vocabulary shard
    vocab_size: int
    temperature: float = 1.0
    tp_group: dist.ProcessGroup | None = None

    def projection(self, chunk_tokens: int = 0) -> Projection:
        return Projection(
            self.hidden_NH,
            self.weight_VH,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            tp_group=self.tp_group,
            chunk_tokens=chunk_tokens,
        )

    @torch.no_grad()
    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The teacher's k most likely ids [N, k] and their log-probs [N, k]; one pass over its logits."""
        stats = statistics(self.projection(), None, k, entropy=False)
        return stats.topk_ids_NK, stats.topk_logits_NK - self.lse_N[:, None]

    @torch.no_grad()
    def logprobs_at(self, ids_NK: Tensor) -> Tensor:
        """The teacher's log-probs [N, K] of global ids [N, K], normalised over the whole vocabulary."""
        head = self.projection()
        logits_NK = self.lse_N.new_zeros(ids_NK.shape)
        H, K = self.weight_VH.shape[1], max(ids_NK.shape[1], 1)
        step = max(1, tile_elements(ids_NK) // (K * H))  # gathered rows of the weight alive
        for top in range(0, ids_NK.shape[0], step):
            rows = slice(top, top + step)
            column_RK, here_RK = head.local(ids_NK[rows], 0, self.weight_VH.shape[0])
            weight_RKH = self.weight_VH[column_RK].to(head.dtype)
            hidden_RH1 = self.hidden_NH[rows, :, None].to(head.dtype)
            logits_NK[rows] = torch.bmm(weight_RKH, hidden_RH1)[..., 0].masked_fill_(~here_RK, 0.0)
        return head.sum_ranks(logits_NK).div_(self.temperature).sub_(self.lse_N[:, None])


@torch.no_grad()
def teacher_fields(head: Head, micro: MicroBatch) -> dict[str, Tensor]:
    """What a teacher keeps of one forward pass over `micro` (see `Policy.score`): per response token its hidden state
    and log-normaliser (`HiddenTargets` with its head), its entropy, and its log-prob of the sampled token."""
    out = head.logprobs(micro.target_N, entropy=True)
    return {
        "teacher_hidden": head.hidden_NH.detach(),
        "teacher_lse": out.lse_N,
        "teacher_entropy": out.entropy_N,
        "teacher_logprobs": out.logprobs_N,
    }


class _LogProbs(torch.autograd.Function):
    """d logp(i) = δ_i − p;  d entropy = −p·(log p + entropy)."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, head: Projection, ids_NM, top_k: int, entropy: bool):
        stats = statistics(head, ids_NM, top_k, entropy=entropy)
        lse_N1 = stats.lse_N[:, None]
        picked_NM = stats.logits_NM - lse_N1
        topk_NK = stats.topk_logits_NK - lse_N1 if top_k else None
        entropy_N = stats.lse_N - stats.mean_logit_N if entropy else None
        ctx.head = head
        ctx.save_for_backward(hidden_NH, weight_VH, ids_NM, stats.topk_ids_NK, stats.lse_N, entropy_N)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[x for x in (stats.topk_ids_NK, stats.lse_N) if x is not None])
        return picked_NM, topk_NK, entropy_N, stats.topk_ids_NK, stats.lse_N

    @staticmethod
    @once_differentiable
    def backward(ctx, g_NM, g_NK, g_entropy_N, _ids, _lse):
        hidden_NH, _, ids_NM, topk_ids_NK, lse_N, entropy_N = ctx.saved_tensors
        listed = [(ids, g) for ids, g in ((ids_NM, g_NM), (topk_ids_NK, g_NK)) if g is not None]
        if not listed and g_entropy_N is None:
            return (None,) * 6
        head = ctx.head
        ids = torch.cat([i for i, _ in listed], dim=1) if listed else ids_NM[:, :0]
        g = torch.cat([g for _, g in listed], dim=1) if listed else lse_N.new_zeros(len(lse_N), 0)
        touched_N = (g != 0).any(dim=1)
        if g_entropy_N is not None:
            touched_N |= g_entropy_N != 0
        touched = touched_rows(head, touched_N)
        ids, g, lse = (take(x, touched) for x in (ids, g, lse_N))
        slope = g.sum(dim=1)
        curve = None
        if g_entropy_N is not None:
            curve = take(g_entropy_N, touched)
            slope = slope + curve * (take(entropy_N, touched) - lse)

        def logit_grad(z: Tensor, rows: slice, first: int) -> Tensor:
            column, here = head.local(ids[rows], first, z.shape[1])
            if curve is None:
                dz = _slope_grad(z, lse[rows], slope[rows])
            else:
                dz = _curve_grad(z, lse[rows], slope[rows], curve[rows])
            return dz.scatter_add_(1, column, g[rows].masked_fill(~here, 0.0))

        grads = stream_backward(head, hidden_NH, touched, logit_grad, ctx.needs_input_grad)
        return *grads, None, None, None, None


@fused
def _slope_grad(z_RC: Tensor, lse_R: Tensor, slope_R: Tensor) -> Tensor:
    return z_RC.sub_(lse_R[:, None]).exp_().mul_(-slope_R[:, None])


@fused
def _curve_grad(z_RC: Tensor, lse_R: Tensor, slope_R: Tensor, curve_R: Tensor) -> Tensor:
    p_RC = (z_RC - lse_R[:, None]).exp_()
    return z_RC.mul_(curve_R[:, None]).add_(slope_R[:, None]).mul_(p_RC).neg_()


def _log_mixture(log_s: Tensor, log_q: Tensor, alpha: float) -> Tensor:
    return torch.logaddexp(log_s + math.log1p(-alpha), log_q + math.log(alpha))


class _Divergence(torch.autograd.Function):
    """With S, Q the two softmaxes: d KL(Q‖S) = S − Q; otherwise S∘(f − Σ S·f), f = log S − log Q for KL(S‖Q) and
    (1−α)(log S − log M) for Jensen-Shannon."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, head: Head, teacher: HiddenTargets, alpha: float, lse_N):
        value_N, kl_N, mean_f_N = (torch.zeros_like(lse_N) for _ in range(3))
        teacher_tiles = teacher.projection(head.chunk_tokens).tiles(teacher.hidden_NH)
        for (rows, _, log_s), (_, _, log_q) in zip(head.tiles(hidden_NH), teacher_tiles, strict=True):
            log_s.sub_(lse_N[rows, None])
            log_q.sub_(teacher.lse_N[rows, None])
            q = log_q.exp()
            gap = log_s - log_q
            kl_N[rows] -= torch.linalg.vecdot(q, gap)
            if alpha == 1:
                mean_f_N[rows] += torch.linalg.vecdot(log_s.exp_(), gap)
            elif alpha > 0:
                log_m = _log_mixture(log_s, log_q, alpha)
                s = log_s.exp()
                mean_f_N[rows] += (1 - alpha) * torch.linalg.vecdot(s, log_s.sub_(log_m))
                value_N[rows] += alpha * torch.linalg.vecdot(q, log_q.sub_(log_m))
        value_N, kl_N, mean_f_N = head.sum_ranks(torch.stack([value_N, kl_N, mean_f_N]))
        # Rounding may leave −1e−8 where student and teacher agree.
        kl_N = kl_N.clamp_min(0.0)
        value_N = kl_N.clone() if alpha == 0 else (value_N + mean_f_N).clamp_min(0.0)
        ctx.head, ctx.teacher, ctx.alpha = head, teacher, alpha
        ctx.save_for_backward(hidden_NH, weight_VH, lse_N, mean_f_N)
        ctx.mark_non_differentiable(kl_N)
        return value_N, kl_N

    @staticmethod
    @once_differentiable
    def backward(ctx, g_N, _kl):
        hidden_NH, _, lse_N, mean_f_N = ctx.saved_tensors
        head, teacher, alpha = ctx.head, ctx.teacher, ctx.alpha
        touched = touched_rows(head, g_N != 0)
        g, lse, mean_f, teacher_lse = (take(x, touched) for x in (g_N, lse_N, mean_f_N, teacher.lse_N))
        teacher_tiles = teacher.projection(head.chunk_tokens).tiles(take(teacher.hidden_NH, touched))

        def logit_grad(z: Tensor, rows: slice, first: int) -> Tensor:
            log_q = next(teacher_tiles)[2].sub_(teacher_lse[rows, None])
            log_s = z.sub_(lse[rows, None])
            s = log_s.exp()
            if alpha == 0:
                return s.sub_(log_q.exp_()).mul_(g[rows, None])
            reference = log_q if alpha == 1 else _log_mixture(log_s, log_q, alpha)
            f = log_s.sub_(reference)
            if alpha < 1:
                f.mul_(1 - alpha)
            return f.sub_(mean_f[rows, None]).mul_(s).mul_(g[rows, None])

        grads = stream_backward(head, hidden_NH, touched, logit_grad, ctx.needs_input_grad)
        return *grads, None, None, None, None
