"""The matrix product with the vocabulary as a stream of tiles, and what one pass over them can give.

A tile is [R rows, C columns] of logits. Columns are the outer loop: a block of the weight is read, and its gradient
written, once per pass however many rows there are. `logits.py` builds log-probs and divergences on this.
Shapes as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Elements of a tile where chunk_tokens is 0. 16 MB of fp32 stay in a CPU's last-level cache, so that the passes over
# the logits cost little beside the matmuls; a GPU wants larger matmuls instead.
CPU_TILE = 4 * 2**20
CUDA_TILE = 64 * 2**20
MAX_ROWS = 1024  # more rows per tile make no matmul faster, fewer columns make it slower
MIN_COLUMNS = 64


def tile_elements(x: Tensor) -> int:
    return CUDA_TILE if x.is_cuda else CPU_TILE


class Projection:
    """hidden · weightᵀ / temperature as a stream of tiles; knows the shard, the padding and the precision."""

    def __init__(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        *,
        temperature: float = 1.0,
        vocab_size: int,
        tp_group: dist.ProcessGroup | None = None,
        chunk_tokens: int = 0,
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
        R = max(1, min(N, MAX_ROWS, tile // MIN_COLUMNS))
        C = max(MIN_COLUMNS, tile // R)
        # The product of low-precision factors is exact in fp32, so the logits are not rounded: an error of 2⁻⁹ of a
        # logit would be one of several percent in a probability. CUDA has such a product; a CPU gets fp32 factors.
        upcast = self.low_precision and not on_cuda
        hidden_NH = hidden_NH.to(self.dtype if upcast else self.weight_VH.dtype)
        buffer = hidden_NH.new_empty(R * min(C, max(self.columns, 1)), dtype=self.dtype)
        for first in range(0, self.columns, C):
            weight_CH = self.weight_VH[first : min(first + C, self.columns)]
            if upcast:
                weight_CH = weight_CH.float()
            for top in range(0, N, R):
                rows = slice(top, min(top + R, N))
                h_RH = hidden_NH[rows]
                shape = (h_RH.shape[0], weight_CH.shape[0])
                logits_RC = buffer[: shape[0] * shape[1]].view(shape)
                if self.low_precision and on_cuda:
                    torch.mm(h_RH, weight_CH.t(), out_dtype=torch.float32, out=logits_RC).div_(self.temperature)
                else:
                    torch.addmm(logits_RC, h_RH, weight_CH.t(), beta=0, alpha=1 / self.temperature, out=logits_RC)
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
        """out += a @ b / temperature (or out = …, where it is fresh): the matmuls of the backward."""
        if not self.low_precision:
            torch.addmm(out, a, b, beta=0 if fresh else 1, alpha=1 / self.temperature, out=out)
            return
        # Low-precision factors, as the gradients of every other linear layer have; the sums over tiles stay fp32.
        a, b = a.to(self.weight_VH.dtype), b.to(self.weight_VH.dtype)
        product = torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a @ b
        if fresh:
            out.copy_(product).div_(self.temperature)
        else:
            out.add_(product, alpha=1 / self.temperature)


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
    scratch = None
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
        new_max = torch.maximum(max_N[rows], z.amax(dim=1))
        shrink = torch.exp(max_N[rows] - new_max)
        if entropy:
            scratch = torch.empty_like(z) if scratch is None or scratch.shape != z.shape else scratch
            e = torch.sub(z, new_max[:, None], out=scratch).exp_()
            weighted_N[rows] = weighted_N[rows] * shrink + torch.linalg.vecdot(e, z)
        else:
            e = z.sub_(new_max[:, None]).exp_()
        sum_N[rows] = sum_N[rows] * shrink + e.sum(dim=1)
        max_N[rows] = new_max
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


def _above(z_RC: Tensor, floor_R: Tensor) -> tuple[Tensor, Tensor]:
    """(values, columns) [R, most in a row] of the numbers above each row's floor, the rest filled with −inf."""
    rows, columns = (z_RC > floor_R[:, None]).nonzero(as_tuple=True)
    count_R = torch.bincount(rows, minlength=z_RC.shape[0])
    place = torch.arange(len(rows), device=rows.device) - (count_R.cumsum(0) - count_R)[rows]
    values = z_RC.new_full((z_RC.shape[0], int(count_R.max())), -math.inf)
    ids = torch.zeros_like(values, dtype=torch.int64)
    values[rows, place], ids[rows, place] = z_RC[rows, columns], columns
    return values, ids


def row_selector(touched_N: Tensor) -> Callable[[Tensor], Tensor]:
    """Keeps the rows with an upstream gradient: masked tokens cost no matmul and get exactly zero."""
    if bool(touched_N.all()):
        return lambda x: x
    index = touched_N.nonzero()[:, 0]
    return lambda x: x[index]


def stream_backward(
    head: Projection,
    hidden_NH: Tensor,
    touched_N: Tensor,
    logit_grad: Callable[[Tensor, slice, int], Tensor],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """(d hidden, d weight) from `logit_grad(logits_RC, rows, first column)`, over the touched rows alone."""
    hidden = row_selector(touched_N)(hidden_NH)
    N = hidden.shape[0]
    d_hidden = torch.zeros_like(hidden, dtype=head.dtype) if needs[0] else None
    d_weight = torch.empty_like(head.weight_VH) if needs[1] else None
    if d_weight is not None:
        d_weight[head.columns if N else 0 :] = 0
    block = d_weight
    for rows, first, z in head.tiles(hidden):
        columns = slice(first, first + z.shape[1])
        dz = logit_grad(z, rows, first)
        if d_hidden is not None:
            head.add_product(d_hidden[rows], dz, head.weight_VH[columns], fresh=False)
        if d_weight is not None:
            if rows.start == 0:
                block = d_weight[columns]
                if head.low_precision:
                    block = torch.empty_like(block, dtype=head.dtype)
            head.add_product(block, dz.t(), hidden[rows], fresh=rows.start == 0)
            if head.low_precision and rows.stop == N:
                d_weight[columns] = block
    if d_hidden is not None:
        d_hidden = d_hidden.to(hidden_NH.dtype)
        if len(hidden) < len(hidden_NH):
            d_hidden = torch.zeros_like(hidden_NH).index_copy_(0, touched_N.nonzero()[:, 0], d_hidden)
    return d_hidden, d_weight
