"""The matrix product with the vocabulary as a stream of tiles, and what one pass over them can give.

A tile is [R rows, C columns] of logits. Columns are the outer loop: a block of the weight is read, and its gradient
written, once per pass however many rows there are. `logits.py` builds log-probs and divergences on this.
Shapes as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Elements of a tile where chunk_tokens is 0. 4 MB of fp32 stay in a CPU's caches, so that the passes over the logits
# cost little beside the matmuls; a GPU wants larger matmuls instead.
CPU_TILE = 2**20
CUDA_TILE = 64 * 2**20
MAX_ROWS = {"cpu": 1024, "cuda": 16384}  # of a tile; with all rows in one tile the weight's gradient is written once
MIN_COLUMNS = 64  # a tile's columns are a multiple of it: rows that begin at odd addresses halve a matmul's speed


def tile_elements(x: Tensor) -> int:
    return CUDA_TILE if x.is_cuda else CPU_TILE


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """On CUDA the function's elementwise passes become one kernel, made at the first call; elsewhere it is itself."""
    compiled = torch.compile(function)

    @wraps(function)
    def either(x: Tensor, *arguments: Any) -> Any:
        return compiled(x, *arguments) if x.is_cuda else function(x, *arguments)

    return either


class Projection:
    """hidden · weightᵀ / temperature as a stream of tiles; knows the shard, the padding and the precision.

    skip_rows: spend no matmul of the backward on rows without an upstream gradient; for that a GPU's earlier work is
    waited for. weight_grad_VH: the sum that the backward adds the weight's gradient to, in fp32 at least, instead of
    handing it to autograd.
    """

    def __init__(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        *,
        temperature: float = 1.0,
        vocab_size: int,
        tp_group: dist.ProcessGroup | None = None,
        chunk_tokens: int = 0,
        skip_rows: bool = True,
        weight_grad_VH: Tensor | None = None,
    ):
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}: must be > 0 where log-probs are trained or scored")
        if hidden_NH.ndim != 2 or weight_VH.ndim != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
            raise ValueError(
                f"hidden {tuple(hidden_NH.shape)} and weight {tuple(weight_VH.shape)}: must be [N, H] and [V, H]"
            )
        self.tp_size = dist.get_world_size(tp_group) if tp_group is not None else 1
        rank = dist.get_rank(tp_group) if tp_group is not None else 0
        if not 0 < vocab_size <= self.tp_size * weight_VH.shape[0]:
            raise ValueError(
                f"vocab_size={vocab_size}: must be 1 … {self.tp_size * weight_VH.shape[0]}, "
                f"the rows of the head over {self.tp_size} tensor-parallel ranks"
            )
        self.hidden_NH, self.weight_VH, self.temperature = hidden_NH, weight_VH, temperature
        self.vocab_size, self.tp_group, self.chunk_tokens = vocab_size, tp_group, chunk_tokens
        self.skip_rows, self.weight_grad_VH = skip_rows, weight_grad_VH
        self.start = rank * weight_VH.shape[0]  # global id of this shard's first row
        # Padded rows lie behind the vocabulary's end; no tile reaches them, so they never take probability.
        self.columns = min(max(vocab_size - self.start, 0), weight_VH.shape[0])
        self.low_precision = weight_VH.dtype in (torch.bfloat16, torch.float16)
        self.dtype = torch.float32 if self.low_precision else weight_VH.dtype

    def tiles(self, hidden_NH: Tensor) -> Iterator[tuple[slice, int, Tensor]]:
        """(rows, first column, logits_RC) over the whole shard; the caller may overwrite the logits."""
        N = hidden_NH.shape[0]
        on_cuda = hidden_NH.is_cuda
        tile = self.chunk_tokens * max(self.columns, 1) or tile_elements(hidden_NH)
        R = max(1, min(N, MAX_ROWS[hidden_NH.device.type], tile // MIN_COLUMNS))
        widest = MIN_COLUMNS * max(1, tile // R // MIN_COLUMNS)
        blocks = max(1, math.ceil(self.columns / widest))
        C = MIN_COLUMNS * max(1, math.ceil(self.columns / blocks / MIN_COLUMNS))
        # The product of low-precision factors is exact in fp32, so the logits are not rounded: an error of 2⁻⁹ of a
        # logit would be one of several percent in a probability. CUDA has such a product; a CPU gets fp32 factors.
        upcast = self.low_precision and not on_cuda
        hidden_NH = hidden_NH.to(self.dtype if upcast else self.weight_VH.dtype)
        # oneDNN is up to twice as fast as BLAS with few inner columns; each new shape costs it half a millisecond.
        onednn = blocks > 1 and not on_cuda and self.dtype is torch.float32 and torch.backends.mkldnn.is_available()
        if onednn:
            hidden_NH = hidden_NH / self.temperature
        precision = {"out_dtype": torch.float32} if self.low_precision and on_cuda else {}
        buffer = hidden_NH.new_empty(0 if onednn else R * min(C, max(self.columns, 1)), dtype=self.dtype)
        for first in range(0, self.columns, C):
            weight_CH = self.weight_VH[first : min(first + C, self.columns)]
            if upcast:
                weight_CH = weight_CH.float()
            for top in range(0, N, R):
                rows = slice(top, min(top + R, N))
                h_RH = hidden_NH[rows]
                if onednn:
                    logits_RC = torch.ops.mkldnn._linear_pointwise(h_RH, weight_CH, None, "none", [], "")
                else:
                    shape = (h_RH.shape[0], weight_CH.shape[0])
                    out = buffer[: shape[0] * shape[1]].view(shape)
                    scale = 1 / self.temperature
                    logits_RC = torch.addmm(out, h_RH, weight_CH.t(), beta=0, alpha=scale, out=out, **precision)
                yield rows, first, logits_RC

    def local(self, ids: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
        """(column of each global id in a tile, whether it is there); the column of an absent id is a valid dummy."""
        column = ids - (self.start + first)
        return column.clamp(0, columns - 1), (column >= 0) & (column < columns)

    def gather_ranks(self, x: Tensor) -> Tensor:
        """[…] on each tensor-parallel rank -> [ranks, …]."""
        if self.tp_size == 1:
            return x[None]
        parts = [torch.empty_like(x) for _ in range(self.tp_size)]
        dist.all_gather(parts, x.contiguous(), group=self.tp_group)
        return torch.stack(parts)

    def sum_ranks(self, x: Tensor) -> Tensor:
        if self.tp_size > 1:
            dist.all_reduce(x, group=self.tp_group)
        return x

    def add_product(self, out: Tensor, a: Tensor, b: Tensor, *, fresh: bool) -> None:
        """out += a @ b / temperature (or out = …, where it is fresh): the matmuls of the backward. The factors have the
        weight's precision, as for the gradients of every other linear layer; out is fp32 at least."""
        factors = {"beta": 0 if fresh else 1, "alpha": 1 / self.temperature, "out": out}
        if not self.low_precision:
            torch.addmm(out, a, b, **factors)
        elif a.is_cuda:
            torch.addmm(out, a, b, out_dtype=torch.float32, **factors)
        elif fresh:
            out.copy_(a @ b).div_(self.temperature)
        else:
            out.add_(a @ b, alpha=1 / self.temperature)


@dataclass
class Statistics:
    lse_N: Tensor
    logits_NM: Tensor | None = None  # of the picked ids
    topk_ids_NK: Tensor | None = None
    topk_logits_NK: Tensor | None = None
    mean_logit_N: Tensor | None = None  # Σ p·z


def statistics(head: Projection, ids_NM: Tensor | None, top_k: int, *, entropy: bool) -> Statistics:
    """One pass over the shard's logits, then one exchange with the other ranks of the vocabulary."""
    h = head.hidden_NH
    N, M = h.shape[0], 0 if ids_NM is None else ids_NM.shape[1]
    new = {"dtype": head.dtype, "device": h.device}
    max_N, sum_N, weighted_N = torch.full((N,), -math.inf, **new), torch.zeros(N, **new), torch.zeros(N, **new)
    logits_NM = torch.zeros(N, M, **new)
    top_NK = torch.full((N, top_k), -math.inf, **new)
    top_ids_NK = torch.zeros(N, top_k, dtype=torch.int64, device=h.device)
    for rows, first, z in head.tiles(h):
        if M:
            column, here = head.local(ids_NM[rows], first, z.shape[1])
            logits_NM[rows] += z.gather(1, column).masked_fill_(~here, 0.0)
        if top_k:
            if first == 0 or z.is_cuda:
                values, columns = z.topk(min(top_k, z.shape[1]), dim=1)
            else:  # after the first tile few numbers are large enough, and a CPU's topk is slow
                values, columns = _above(z, top_NK[rows, -1])
            values = torch.cat([top_NK[rows], values], dim=1)
            columns = torch.cat([top_ids_NK[rows], columns + (head.start + first)], dim=1)
            top_NK[rows], best = values.topk(top_k, dim=1)
            top_ids_NK[rows] = columns.gather(1, best)
        if entropy:
            max_N[rows], sum_N[rows], weighted_N[rows] = _fold_both(z, max_N[rows], sum_N[rows], weighted_N[rows])
        else:
            max_N[rows], sum_N[rows] = _fold(z, max_N[rows], sum_N[rows])
    lse_N = max_N + sum_N.log()
    mean_N = weighted_N / sum_N.clamp_min(torch.finfo(head.dtype).tiny)

    ranks = head.gather_ranks(torch.cat([lse_N[:, None], mean_N[:, None], logits_NM, top_NK], dim=1))
    lse_N = ranks[..., 0].logsumexp(dim=0)
    out = Statistics(lse_N, ranks[..., 2 : 2 + M].sum(dim=0))
    if entropy:
        out.mean_logit_N = (torch.exp(ranks[..., 0] - lse_N) * ranks[..., 1]).sum(dim=0)
    if top_k:
        values = ranks[..., 2 + M :].transpose(0, 1).flatten(1)
        ids = head.gather_ranks(top_ids_NK).transpose(0, 1).flatten(1)
        out.topk_logits_NK, best = values.topk(top_k, dim=1)
        out.topk_ids_NK = ids.gather(1, best)
    return out


@fused
def _fold(z_RC: Tensor, max_R: Tensor, sum_R: Tensor) -> tuple[Tensor, Tensor]:
    """The running maximum and Σ exp(z − maximum) with one more tile."""
    _, tile_max_R, tile_sum_R, _ = _exp(z_RC)
    new_R = torch.maximum(max_R, tile_max_R)
    return new_R, sum_R * torch.exp(max_R - new_R) + tile_sum_R * torch.exp(tile_max_R - new_R)


@fused
def _fold_both(z_RC: Tensor, max_R: Tensor, sum_R: Tensor, weighted_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with Σ z · exp(z − maximum)."""
    e_RC, tile_max_R, tile_sum_R, scale = _exp(z_RC)
    new_R = torch.maximum(max_R, tile_max_R)
    old_share_R, tile_share_R = torch.exp(max_R - new_R), torch.exp(tile_max_R - new_R)
    weighted_R = weighted_R * old_share_R + torch.linalg.vecdot(e_RC, z_RC) * scale * tile_share_R
    return new_R, sum_R * old_share_R + tile_sum_R * tile_share_R, weighted_R


def _exp(z_RC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
    """(e [R, C], maximum [R], Σ exp(z − maximum) [R], scale) with exp(z − maximum) = scale · e."""
    max_R = z_RC.amax(dim=1)
    if z_RC.is_cuda:
        e_RC = (z_RC - max_R[:, None]).exp()
        return e_RC, max_R, e_RC.sum(dim=1), 1.0
    # On a CPU PyTorch's softmax takes half the time of its exp alone. The largest probability is one over the sum.
    p_RC = z_RC.softmax(dim=1)
    sum_R = p_RC.amax(dim=1).reciprocal()
    return p_RC, max_R, sum_R, sum_R


def _above(z_RC: Tensor, floor_R: Tensor) -> tuple[Tensor, Tensor]:
    """(values, columns) [R, most in a row] of the numbers above each row's floor, the rest filled with −inf.

    The maxima of every 16 columns, C/16 apart, tell where to look."""
    R, C = z_RC.shape
    blocks_RnB = z_RC.view(R, math.gcd(C, 16), -1)
    rows, block = (blocks_RnB.amax(dim=1) > floor_R[:, None]).nonzero(as_tuple=True)
    near = blocks_RnB[rows, :, block]
    which, place = (near > floor_R[rows, None]).nonzero(as_tuple=True)
    rows, columns, found = rows[which], block[which] + place * blocks_RnB.shape[2], near[which, place]
    count_R = torch.bincount(rows, minlength=R)
    place = torch.arange(len(rows), device=rows.device) - (count_R.cumsum(0) - count_R)[rows]
    values = z_RC.new_full((R, int(count_R.max())), -math.inf)
    ids = torch.zeros_like(values, dtype=torch.int64)
    values[rows, place], ids[rows, place] = found, columns
    return values, ids


def touched_rows(head: Projection, touched_N: Tensor) -> Tensor | None:
    """Which rows have an upstream gradient, None for all of them: masked tokens cost no matmul and get exactly zero."""
    return None if not head.skip_rows or bool(touched_N.all()) else touched_N.nonzero()[:, 0]


def take(x_N: Tensor, rows: Tensor | None) -> Tensor:
    return x_N if rows is None else x_N[rows]


def stream_backward(
    head: Projection,
    hidden_NH: Tensor,
    touched: Tensor | None,
    logit_grad: Callable[[Tensor, slice, int], Tensor],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """(d hidden, d weight) from `logit_grad(logits_RC, rows, first column)`, over the touched rows alone."""
    hidden = take(hidden_NH, touched)
    factor_NH = hidden.to(head.weight_VH.dtype)
    N, into = hidden.shape[0], head.weight_grad_VH
    d_hidden = torch.zeros_like(hidden, dtype=head.dtype) if needs[0] else None
    d_weight = torch.empty_like(head.weight_VH) if needs[1] and into is None else None
    if d_weight is not None:
        d_weight[head.columns if N else 0 :] = 0
    block = d_weight
    for rows, first, z in head.tiles(hidden):
        columns = slice(first, first + z.shape[1])
        dz = logit_grad(z, rows, first).to(head.weight_VH.dtype)
        if d_hidden is not None:
            head.add_product(d_hidden[rows], dz, head.weight_VH[columns], fresh=False)
        if d_weight is not None:
            if rows.start == 0:
                block = d_weight[columns]
                if head.low_precision:
                    block = torch.empty_like(block, dtype=head.dtype)
            head.add_product(block, dz.t(), factor_NH[rows], fresh=rows.start == 0)
            if head.low_precision and rows.stop == N:
                d_weight[columns] = block
        elif needs[1]:
            head.add_product(into[columns], dz.t(), factor_NH[rows], fresh=False)
    if d_hidden is not None:
        d_hidden = d_hidden.to(hidden_NH.dtype)
        if touched is not None:
            d_hidden = torch.zeros_like(hidden_NH).index_copy_(0, touched, d_hidden)
    return d_hidden, d_weight
