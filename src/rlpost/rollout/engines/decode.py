"""The batched decode loop over a Transformers model with a KV cache of its own.

Every sequence has a row of the cache and is padded on the right, so its keys lie at its own positions whatever else is
in the batch. Requests with equal prompts share one prefill. Rows of finished sequences are given to waiting ones.

Shape suffixes: R requests of the call, B rows in use, P unique prompts of a prefill, S positions, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from rlpost.rollout.engine import Completion, Request
from rlpost.rollout.engines.sampling import SamplingTable, sample_tokens

ATTENTION = "rlpost_rows"  # the name under which Transformers finds `_attend`
POSITIONS_PER_BLOCK = 128  # of the cache, made usable together
PREFILL_TOKENS = 4096  # padded prompt tokens of one prefill
COMPACT_BELOW = 0.75  # of the rows still alive: then the finished ones are dropped


class KVCache:
    """Keys and values of `rows` sequences of at most `length` tokens; what Transformers' layers call to cache them."""

    def __init__(self, config, rows: int, length: int, dtype: torch.dtype, device: torch.device):
        heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, rows, heads, length, head_dim)
        self.length, self.defined = length, 0
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))

    def define(self, length: int) -> None:
        """Zero what positions below length hold by chance: under a mask, a NaN would still spread."""
        if length > self.defined:
            end = min(self.length, -(-length // POSITIONS_PER_BLOCK) * POSITIONS_PER_BLOCK)
            for tensor in (self.keys, self.values):
                tensor[:, :, :, self.defined : end] = 0
            self.defined = end

    def at_prefill(self, first_row: int, prompt_of_row: Tensor, length: int) -> None:
        """The next forward pass fills rows first_row … with the prompts of these indices, padded to length."""
        self.define(length)
        self._prompts, self._slice = prompt_of_row, slice(first_row, first_row + len(prompt_of_row))

    def at_decode(self, position_B: Tensor, length: int) -> None:
        """The next forward pass adds one token per row, at these positions, all below length."""
        self.define(length)
        self._prompts, self._position = None, position_B
        self._row, self._length = torch.arange(len(position_B), device=position_B.device), length

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self._prompts is not None:
            length = key.shape[2]
            keys[self._slice, :, :length] = key[self._prompts]
            values[self._slice, :, :length] = value[self._prompts]
            return key, value
        keys[self._row, :, self._position] = key[:, :, 0]
        values[self._row, :, self._position] = value[:, :, 0]
        rows = len(self._row)
        return keys[:rows, :, : self._length], values[:rows, :, : self._length]

    def move(self, source: int, target: int, length: int) -> None:
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]


def _attend(module, query, key, value, attention_mask, scaling=None, visible_B11S=None, **_kwargs):
    """Attention for rows padded on the right. A prefill or a score is causal, so no token sees the padding; a decode
    step sees what visible_B11S (additive, in the query's dtype) leaves. Query heads of one key head are folded into
    the length there, so that no key is copied per query head."""
    if visible_B11S is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    rows, heads, _, head_dim = query.shape
    folded = query.view(rows, key.shape[1], heads // key.shape[1], head_dim)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=visible_B11S, scale=scaling)
    return out.reshape(rows, 1, heads, head_dim), None


AttentionInterface.register(ATTENTION, _attend)


class Decoder:
    """One call of `generate`: all its requests, from prompts to completions."""

    def __init__(
        self,
        model: nn.Module,
        requests: Sequence[Request],
        eos_ids: Sequence[int],
        max_batch: int,
    ):
        self.backbone, self.head = model.base_model, model.get_output_embeddings()
        device = self.device = self.head.weight.device
        params = [request.params for request in requests]
        budgets = [p.max_tokens for p in params]
        self.prompts = [tuple(request.prompt_ids) for request in requests]
        total, width = len(requests), max(budgets) + 1
        self.max_batch = min(max_batch, total)
        longest = max(len(p) + b for p, b in zip(self.prompts, budgets))
        self.cache = KVCache(model.config, self.max_batch, longest, self.head.weight.dtype, device)
        # Transformers changes this argument's name, and warns of the former one.
        argument = "cache" if "cache" in signature(self.backbone.forward).parameters else "past_key_values"
        self.cached = {argument: self.cache}
        self.table = SamplingTable.of(params, self.head.weight.shape[0], device)

        # State by request; a row in use points to its request. A finished row that was not yet dropped goes on writing
        # in place at its `count`: the column after its last token, which nobody reads.
        self.prompt_length_R = torch.tensor([len(p) for p in self.prompts], device=device)
        self.budget_R = torch.tensor(budgets, device=device)
        self.stop_ids_RK = _stop_table(requests, eos_ids).to(device)
        self.uniform_RT = torch.stack([_uniforms(r.seed, r.params.max_tokens, width) for r in requests]).to(device)
        self.ids_RT = torch.zeros(total, width, dtype=torch.long, device=device)
        self.logprobs_RT = torch.zeros(total, width, device=device)
        self.count_R = torch.zeros(total, dtype=torch.long, device=device)
        self.done_R = torch.zeros(total, dtype=torch.bool, device=device)
        self.stopped_R = torch.zeros(total, dtype=torch.bool, device=device)

        self.row_request: list[int] = []  # the request of each row in use
        self.request_B = torch.empty(0, dtype=torch.long, device=device)
        self.longest = 0  # upper bound of the positions in use
        self.waiting = self._group_by_prompt()

    def run(self, aborted: Callable[[], bool]) -> None:
        alive = 0
        while (alive or self.waiting) and not aborted():
            if self._room_for_waiting(alive):
                self._drop_finished()
                self._admit()
            else:
                if alive <= COMPACT_BELOW * len(self.row_request):
                    self._drop_finished()
                self._step()
            alive = len(self.row_request) - int(self.done_R[self.request_B].sum())

    def completions(self, version: int) -> list[Completion]:
        if not bool(torch.isfinite(self.logprobs_RT).all()):
            raise FloatingPointError(f"the model of version {version} gives log-probs that are not finite")
        done, stopped, count = self.done_R.tolist(), self.stopped_R.tolist(), self.count_R.tolist()
        ids, logprobs = self.ids_RT.tolist(), self.logprobs_RT.tolist()
        reason = ["abort" if not d else "stop" if s else "length" for d, s in zip(done, stopped)]
        return [Completion(ids[i][:n], logprobs[i][:n], reason[i], version) for i, n in enumerate(count)]

    def _group_by_prompt(self) -> deque[list[int]]:
        """Requests of equal prompts, at most max_batch in a group; the longest prompts first, so that prompts
        prefilled together differ little in length."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, prompt in enumerate(self.prompts):
            groups.setdefault(prompt, []).append(i)
        pieces = [g[i : i + self.max_batch] for g in groups.values() for i in range(0, len(g), self.max_batch)]
        return deque(sorted(pieces, key=lambda g: len(self.prompts[g[0]]), reverse=True))

    def _room_for_waiting(self, alive: int) -> bool:
        if not self.waiting or alive > COMPACT_BELOW * self.max_batch:
            return False
        return alive + len(self.waiting[0]) <= self.max_batch

    def _admit(self) -> None:
        while self.waiting and len(self.row_request) + len(self.waiting[0]) <= self.max_batch:
            groups, rows, longest = [], len(self.row_request), len(self.prompts[self.waiting[0][0]])
            while self.waiting and rows + len(self.waiting[0]) <= self.max_batch:
                if groups and (len(groups) + 1) * longest > PREFILL_TOKENS:
                    break
                groups.append(self.waiting.popleft())
                rows += len(groups[-1])
            self._prefill(groups)

    def _prefill(self, groups: list[list[int]]) -> None:
        """Compute each group's prompt once, give its keys to all its rows, and sample their first tokens."""
        prompts = [self.prompts[group[0]] for group in groups]
        requests = [i for group in groups for i in group]
        prompt_of_row = torch.tensor([p for p, group in enumerate(groups) for _ in group], device=self.device)
        ids_PS = pad_right(prompts, self.device)
        self.cache.at_prefill(len(self.row_request), prompt_of_row, ids_PS.shape[1])
        position_1S = torch.arange(ids_PS.shape[1], device=self.device)[None]
        hidden_PSH = self.backbone(ids_PS, position_ids=position_1S, **self.cached).last_hidden_state
        last_P = torch.tensor([len(p) - 1 for p in prompts], device=self.device)
        logits_PV = self.head(hidden_PSH[torch.arange(len(prompts), device=self.device), last_P])
        self._record(logits_PV[prompt_of_row], torch.tensor(requests, device=self.device))
        self._use_rows(self.row_request + requests)

    def _step(self) -> None:
        """One token for every row in use."""
        request_B = self.request_B
        count_B = self.count_R[request_B]
        position_B = self.prompt_length_R[request_B] + count_B - 1
        visible_BS = torch.arange(self.longest, device=self.device) <= position_B[:, None]
        mask = torch.zeros(visible_BS.shape, dtype=self.cache.keys.dtype, device=self.device)
        mask.masked_fill_(~visible_BS, float("-inf"))
        self.cache.at_decode(position_B, self.longest)
        hidden_B1H = self.backbone(
            self.ids_RT[request_B, count_B - 1][:, None],
            position_ids=position_B[:, None],
            visible_B11S=mask[:, None, None],
            **self.cached,
        ).last_hidden_state
        self._record(self.head(hidden_B1H[:, 0]), request_B)
        self.longest = min(self.longest + 1, self.cache.length)

    def _record(self, logits_BV: Tensor, request_B: Tensor) -> None:
        """Sample a token per row, and mark what is finished."""
        count_B = self.count_R[request_B]
        ids_B, logprobs_B = sample_tokens(logits_BV, self.uniform_RT[request_B, count_B], self.table, request_B)
        self.ids_RT[request_B, count_B], self.logprobs_RT[request_B, count_B] = ids_B, logprobs_B
        alive_B = ~self.done_R[request_B]
        count_B = count_B + alive_B
        stop_B = (ids_B[:, None] == self.stop_ids_RK[request_B]).any(-1) & alive_B
        self.count_R[request_B] = count_B
        self.stopped_R[request_B] |= stop_B
        self.done_R[request_B] |= stop_B | (count_B >= self.budget_R[request_B])

    def _drop_finished(self) -> None:
        """Move the rows that live on to the front of the cache."""
        done, lengths = self.done_R.tolist(), (self.prompt_length_R + self.count_R).tolist()
        rows = list(self.row_request)
        alive = sum(not done[i] for i in rows)
        movable = [row for row in range(alive, len(rows)) if not done[rows[row]]]
        for target in range(alive):
            if done[rows[target]]:
                source = movable.pop()
                self.cache.move(source, target, lengths[rows[source]])
                rows[target] = rows[source]
        self._use_rows(rows[:alive])

    def _use_rows(self, row_request: list[int]) -> None:
        self.row_request = row_request
        self.request_B = torch.tensor(row_request, dtype=torch.long, device=self.device)
        lengths = (self.prompt_length_R + self.count_R)[self.request_B]
        self.longest = int(lengths.max()) if row_request else 0


def pad_right(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[P, S] token ids; the padding (0) is seen by no real token."""
    longest = max(map(len, sequences))
    return torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences], device=device)


def _stop_table(requests: Sequence[Request], eos_ids: Sequence[int]) -> Tensor:
    """[R, K]: each request's stop tokens, filled up with −1."""
    stops = [[*r.params.stop_token_ids, *(() if r.params.ignore_eos else eos_ids)] for r in requests]
    width = max(1, *map(len, stops))
    return torch.tensor([[*ids, *[-1] * (width - len(ids))] for ids in stops])


def _uniforms(seed: int, count: int, width: int) -> Tensor:
    """The request's uniform numbers, drawn on the CPU so that they are the same on every device."""
    uniform = torch.zeros(width)
    uniform[:count] = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    return uniform
