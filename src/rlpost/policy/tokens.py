"""Which tokens of a micro-batch this rank runs, and which response tokens it takes the loss of.

Context parallelism cuts every sequence, padded to a multiple of 2·cp, into 2·cp chunks; rank r holds chunks r and
2·cp−1−r, so that all ranks have the same number of causal pairs (the zigzag of Megatron). The losses are those of
whole sequences: behind the last layer each rank takes some of them, with all their response tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlpost.data.packing import assign, worth_sharing
from rlpost.types import MicroBatch, to_device

if TYPE_CHECKING:
    from rlpost.parallel import Axis


@dataclass
class LocalTokens:
    """T tokens of this rank, in pieces that attend to the first keys of their own sequence, aligned at the end."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    query_lengths: list[int]  # of the pieces: whole sequences, or two chunks of each
    key_lengths: list[int]
    keys_K: Tensor | None  # where the pieces' keys stand in the tokens of all context ranks; None: the own tokens
    place_M: Tensor  # where each of the micro-batch's M tokens stands in the tokens of all context ranks; on the CPU
    predict_N: Tensor  # the same of the positions that predict response tokens
    rows_R: Tensor | None  # the response tokens (of N) whose loss this rank takes; None: all
    balance_BT: Tensor | None = None  # with a loss on the router: see policy/balance.py
    all_count: bool = False  # on a GPU: no response token is known to bring no gradient

    @property
    def predict_R(self) -> Tensor:
        return self.predict_N if self.rows_R is None else self.predict_N[self.rows_R]

    def losses_of(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch with only the response tokens of this rank."""
        return micro if self.rows_R is None else take_rows(micro, self.rows_R)

    def to(self, device: torch.device) -> LocalTokens:
        names = [name for name, v in vars(self).items() if isinstance(v, Tensor) and name != "place_M"]
        moved = {name: to_device(getattr(self, name), device) for name in names}
        return replace(self, **moved)


def every_token_counts(micro: MicroBatch) -> bool:
    """Whether nothing says of a response token that it brings no gradient; its loss may yet bring none."""
    names = ("weights", "loss_mask", "distill_mask", "advantages")
    return all(bool((micro.fields[name] != 0).all()) for name in names if name in micro.fields)


def filler() -> MicroBatch:
    """One token from which nothing is predicted."""
    one, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return MicroBatch(one, one, torch.tensor([0, 1], dtype=torch.int32), 1, none, none, none, samples=[])


def take_rows(micro: MicroBatch, rows_R: Tensor) -> MicroBatch:
    fields = {name: value[rows_R] for name, value in micro.fields.items()}
    cut = {name: getattr(micro, name)[rows_R] for name in ("predict_N", "target_N", "sequence_N")}
    return replace(micro, fields=fields, **cut)


def local_tokens(micro: MicroBatch, cp: Axis, multiple: int = 1, at_least: int = 0) -> LocalTokens:
    """What one rank runs of `micro`, on the CPU. Its number of tokens is a multiple of `multiple`, and not below
    `at_least` (such a multiple itself), by a sequence of its own that nothing is predicted from: sequence parallelism
    cuts the tokens evenly, and virtual pipeline stages want micro-batches of one length."""
    starts = micro.cu_seqlens.tolist()
    if cp.size == 1:
        return _prefixes_once(replace(micro, fields={}, teacher_head=None).to("cpu"), starts, multiple, at_least)
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    chunks = 2 * cp.size
    padded = [-(-length // chunks) * chunks for length in lengths]
    if extra := max(-sum(padded) % math.lcm(chunks, cp.size * multiple), cp.size * at_least - sum(padded)):
        padded.append(extra)
    ends = [0, *itertools.accumulate(padded)]
    # A pad token continues the positions of its sequence; causality keeps it out of everything before it.
    position_ids = torch.cat([torch.arange(length) for length in padded])
    shift_B = torch.tensor([at - start for at, start in zip(ends, starts[:-1])])
    place_T = torch.arange(starts[-1]) + shift_B.repeat_interleave(torch.tensor(lengths))
    input_ids = torch.zeros(ends[-1], dtype=torch.int64)
    input_ids[place_T] = micro.input_ids_T.cpu()
    predict_N = place_T[micro.predict_N.cpu()]
    sizes = [length // chunks for length in padded]
    held = [
        torch.cat([_span(at, size, c) for at, size in zip(ends, sizes) for c in _held(rank, cp.size)])
        for rank in range(cp.size)
    ]
    gathered = torch.empty(ends[-1], dtype=torch.int64)  # where a token stands in the ranks' tokens one after the other
    gathered[torch.cat(held)] = torch.arange(ends[-1])
    own = held[cp.rank]
    pieces = [(at, size, (c + 1) * size) for at, size in zip(ends, sizes) for c in _held(cp.rank, cp.size)]
    keys = torch.cat([torch.arange(at, at + length) for at, _, length in pieces])
    return LocalTokens(
        input_ids[own],
        position_ids[own],
        [size for _, size, _ in pieces],
        [length for _, _, length in pieces],
        gathered[keys],
        gathered[place_T],
        gathered[predict_N],
        _rows_of_sequences(micro.sequence_N.cpu(), cp)[cp.rank],
    )


def _prefixes_once(micro: MicroBatch, starts: list[int], multiple: int, at_least: int) -> LocalTokens:
    """What sequences agree on from their start, up to the first token that is predicted, runs once: the prompt of a
    group's samples, the question before a teacher's hints.

    What follows is a piece of its own, and may fork again: its keys are those before it and its own. Activations and
    gradients are those of whole sequences, since a token's state does not depend on what comes after it.
    """
    run = _Run(micro.input_ids_T, starts, _prompt_lengths(micro, starts))
    run.fork(list(range(len(starts) - 1)), 0, 0, torch.arange(0))
    order, place_T, pieces = torch.cat(run.order), run.place_T, run.pieces
    if len(order) == starts[-1]:  # nothing is shared
        order = place_T = torch.arange(len(order))
        pieces = [(last - first, order[first:last]) for first, last in itertools.pairwise(starts)]
    input_ids, position_ids, at = micro.input_ids_T[order], micro.position_ids_T[order], len(order)
    if extra := max(-at % multiple, at_least - at):
        input_ids = torch.cat([input_ids, input_ids.new_zeros(extra)])
        position_ids = torch.cat([position_ids, torch.arange(extra)])
        pieces.append((extra, torch.arange(at, at + extra)))
    queries, keys = [size for size, _ in pieces], [len(piece) for _, piece in pieces]
    keys_K = None if queries == keys else torch.cat([piece for _, piece in pieces])
    return LocalTokens(input_ids, position_ids, queries, keys, keys_K, place_T, place_T[micro.predict_N], None)


class _Run:
    """The tokens that run, as they are found. limits: how many tokens of each sequence another may share.

    Attributes: order, where they stand in the micro-batch; place_T, the inverse for all of its tokens; pieces, how many
    queries each has and where its keys stand among the tokens that run.
    """

    def __init__(self, ids_T: Tensor, starts: list[int], limits: list[int]):
        self.ids_T, self.starts, self.limits = ids_T, starts, limits
        self.order: list[Tensor] = []
        self.pieces: list[tuple[int, Tensor]] = []
        self.place_T = torch.empty(starts[-1], dtype=torch.int64)
        self.tokens = 0

    def fork(self, members: list[int], ran: int, agreed: int, path_K: Tensor) -> None:
        """Sequences that agree on `agreed` tokens, of which the first `ran` run already, at `path_K`."""
        if len(members) == 1:
            self._add(members, ran, self.starts[members[0] + 1] - self.starts[members[0]], path_K)
            return
        agreed = self._agreement(members, agreed)
        whole = sum(self.starts[i + 1] - self.starts[i] - ran for i in members)
        if worth_sharing((len(members) - 1) * (agreed - ran), whole):
            path_K = self._add(members, ran, agreed, path_K)
            ran = agreed
        parts: dict[tuple[int, int], list[int]] = {}
        for i in members:
            more = agreed < self.limits[i]  # else it shares no more, and goes on alone
            parts.setdefault((0, int(self.ids_T[self.starts[i] + agreed])) if more else (1, i), []).append(i)
        for part in parts.values():
            self.fork(part, ran, agreed, path_K)

    def _add(self, members: list[int], first: int, last: int, path_K: Tensor) -> Tensor:
        """Tokens first … last of these sequences run once; the path with them."""
        if first == last:
            return path_K
        own = torch.arange(self.tokens, self.tokens + last - first)
        self.tokens += last - first
        self.order.append(torch.arange(self.starts[members[0]] + first, self.starts[members[0]] + last))
        for i in members:
            self.place_T[self.starts[i] + first : self.starts[i] + last] = own
        path_K = torch.cat([path_K, own])
        self.pieces.append((last - first, path_K))
        return path_K

    def _agreement(self, members: list[int], agreed: int) -> int:
        """How many tokens all of them have in common, and may share."""
        limit = min(self.limits[i] for i in members)
        if limit <= agreed:
            return agreed
        rows = torch.stack([self.ids_T[self.starts[i] + agreed : self.starts[i] + limit] for i in members])
        differ = (rows != rows[0]).any(dim=0).nonzero()
        return agreed + (int(differ[0]) if len(differ) else rows.shape[1])


def _prompt_lengths(micro: MicroBatch, starts: list[int]) -> list[int]:
    """Tokens of each sequence up to the one that predicts first; 0 where nothing is predicted."""
    none_B = torch.full((len(starts) - 1,), -1)
    first_B = none_B.scatter_reduce(0, micro.sequence_N, micro.predict_N, "amin", include_self=False)
    return [max(0, first + 1 - start) for first, start in zip(first_B.tolist(), starts)]


def _held(rank: int, ranks: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank


def _span(start: int, size: int, chunk: int) -> Tensor:
    return torch.arange(start + chunk * size, start + (chunk + 1) * size)


def _rows_of_sequences(sequence_N: Tensor, cp: Axis) -> list[Tensor]:
    """Each rank's response tokens: whole sequences, their tokens balanced, so that any loss sees what it needs."""
    counts: Sequence[int] = torch.bincount(sequence_N).tolist()
    mine = [torch.isin(sequence_N, torch.tensor(part, dtype=torch.int64)) for part in assign(counts, cp.size)]
    return [rows_N.nonzero()[:, 0] for rows_N in mine]
