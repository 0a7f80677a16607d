"""The batched decode loop over a Transformers model with a KV cache of its own.

Every sequence has a row of the cache, where its keys lie at its own positions whatever else is in the batch. Requests
with equal prompts share one prefill and the prompt's keys. Rows of finished sequences are given to waiting ones.

Shape suffixes: R requests of the call, B rows in use, P unique prompts of a prefill, S positions, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from inspect import signature

import torch
from torch import Tensor, nn

from rlpost.rollout.engine import Completion, Request
from rlpost.rollout.engines.kv_cache import KeysAndValues, KVCache
from rlpost.rollout.engines.sampling import SamplingTable, sample_tokens

PREFILL_TOKENS = 4096  # padded prompt tokens of one prefill
COMPACT_BELOW = 0.75  # of the rows still alive: then the finished ones are dropped


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
        self.waiting = self._group_by_prompt()
        kind = {"dtype": self.head.weight.dtype, "device": device}
        self.cache = KVCache(
            KeysAndValues(model.config, min(len(self.waiting), self.max_batch), max(map(len, self.prompts)), **kind),
            KeysAndValues(model.config, self.max_batch, max(budgets), **kind),
        )
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
        self.row_prompt: list[int] = []  # the place of its prompt in the cache
        self.prompt_lengths: list[int] = []  # by place
        self.request_B = torch.empty(0, dtype=torch.long, device=device)
        self.longest = 0  # upper bound of a row's own positions in use

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
        """Compute each group's prompt once, for all its rows, and sample their first tokens."""
        prompts = [self.prompts[group[0]] for group in groups]
        requests = [i for group in groups for i in group]
        prompt_of_row = [p for p, group in enumerate(groups) for _ in group]
        ids_PS = pad_right(prompts, self.device)
        first = len(self.prompt_lengths)
        self.cache.at_prefill(first, *ids_PS.shape)
        position_1S = torch.arange(ids_PS.shape[1], device=self.device)[None]
        hidden_PSH = self._backbone(ids_PS, position_1S)
        last_P = torch.tensor([len(p) - 1 for p in prompts], device=self.device)
        logits_PV = self.head(hidden_PSH[torch.arange(len(prompts), device=self.device), last_P])
        self._record(logits_PV[prompt_of_row], torch.tensor(requests, device=self.device))
        self.prompt_lengths += map(len, prompts)
        self._use_rows(self.row_request + requests, self.row_prompt + [first + p for p in prompt_of_row])

    def _step(self) -> None:
        """One token for every row in use."""
        request_B = self.request_B
        own_B = self.count_R[request_B] - 1
        self.cache.at_decode(own_B, self.longest)
        position_B = self.prompt_length_R[request_B] + own_B
        ids_B1 = self.ids_RT[request_B, own_B][:, None]
        hidden_B1H = self._backbone(ids_B1, position_B[:, None], kv_cache=self.cache)
        self._record(self.head(hidden_B1H[:, 0]), request_B)
        self.longest = min(self.longest + 1, self.cache.rows.length)

    def _backbone(self, ids_BS: Tensor, position_BS: Tensor, **to_attention: KVCache) -> Tensor:
        """[B, S, H]: the last hidden states. to_attention: see `kv_cache.attend`."""
        return self.backbone(ids_BS, position_ids=position_BS, **self.cached, **to_attention).last_hidden_state

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
        """Move the rows that live on, and their prompts, to the front of the cache."""
        done, counts = self.done_R.tolist(), self.count_R.tolist()
        requests, prompts = list(self.row_request), list(self.row_prompt)
        rows, alive = _to_the_front([not done[i] for i in requests])
        for source, target in rows:
            self.cache.rows.move(source, target, counts[requests[source]])
            requests[target], prompts[target] = requests[source], prompts[source]
        requests, prompts, lengths = requests[:alive], prompts[:alive], self.prompt_lengths
        wanted = set(prompts)
        moves, used = _to_the_front([place in wanted for place in range(len(lengths))])
        for source, target in moves:
            self.cache.prompts.move(source, target, lengths[source])
            lengths[target] = lengths[source]
        places = dict(moves)
        self.prompt_lengths = lengths[:used]
        self._use_rows(requests, [places.get(place, place) for place in prompts])

    def _use_rows(self, row_request: list[int], row_prompt: list[int]) -> None:
        self.row_request, self.row_prompt = row_request, row_prompt
        self.request_B = torch.tensor(row_request, dtype=torch.long, device=self.device)
        self.longest = int(self.count_R[self.request_B].max()) if row_request else 0
        self.cache.use_prompts(self.prompt_lengths, row_prompt)


def _to_the_front(wanted: Sequence[bool]) -> tuple[list[tuple[int, int]], int]:
    """(moves from a source to a target that bring what is wanted to the front, how many those are)."""
    count = sum(wanted)
    behind = [i for i in range(count, len(wanted)) if wanted[i]]
    return [(behind.pop(), target) for target in range(count) if not wanted[target]], count


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
