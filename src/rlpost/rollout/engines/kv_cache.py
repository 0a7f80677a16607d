"""Keys and values of the decode loop, and attention over them.

The keys of a prompt are there once, whatever number of rows samples from it; a row has only those of its own tokens. So
a decode step reads a prompt once for all its rows, whose queries lie side by side, and the two partial results of a
row, over its prompt and over its own tokens, are joined by their log-normalisers.

Shape suffixes: P prompts in use, S prompt positions, N rows of the prompt that has most, B rows in use, T positions of
a row's own tokens, H key heads, G query heads of each, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

ATTENTION = "rlpost_rows"  # the name under which Transformers finds `attend`
POSITIONS_PER_BLOCK = 128  # of the cache, made usable together


class KeysAndValues:
    """Of `count` sequences, padded on the right to at most `length` positions, in all layers."""

    def __init__(self, config, count: int, length: int, dtype: torch.dtype, device: torch.device):
        heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, count, heads, length, head_dim)
        self.length, self._defined = length, 0
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))

    def define(self, length: int) -> None:
        """Zero what positions below length hold by chance: under a mask, a NaN would still spread."""
        if length > self._defined:
            end = min(self.length, -(-length // POSITIONS_PER_BLOCK) * POSITIONS_PER_BLOCK)
            for tensor in (self.keys, self.values):
                tensor[:, :, :, self._defined : end] = 0
            self._defined = end

    def move(self, source: int, target: int, length: int) -> None:
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]

    def hidden_beyond(self, length_C: Tensor, length: int) -> Tensor:
        """[C, 1, 1, length], added to scores: no sequence is seen beyond its own length."""
        visible_CL = torch.arange(length, device=self.keys.device) < length_C[:, None]
        mask = torch.zeros(visible_CL.shape, dtype=self.keys.dtype, device=self.keys.device)
        return mask.masked_fill_(~visible_CL, float("-inf"))[:, None, None]


class KVCache:
    """What Transformers' layers call to cache keys and values; `at_prefill` or `at_decode` comes before each pass."""

    def __init__(self, prompts: KeysAndValues, rows: KeysAndValues):
        self.prompts, self.rows = prompts, rows
        self._prefilled: slice | None = None

    def use_prompts(self, length_P: Sequence[int], prompt_of_row: Sequence[int]) -> None:
        """The prompts in use with their lengths, and the prompt of each row in use."""
        device = self.prompts.keys.device
        rows_of_prompt: list[list[int]] = [[] for _ in length_P]
        for row, prompt in enumerate(prompt_of_row):
            rows_of_prompt[prompt].append(row)
        most = max(map(len, rows_of_prompt), default=0)
        self._row_PN = torch.tensor([[*rows, *[0] * (most - len(rows))] for rows in rows_of_prompt], device=device)
        places = {row: p * most + n for p, rows in enumerate(rows_of_prompt) for n, row in enumerate(rows)}
        self._place_B = torch.tensor([places[row] for row in range(len(prompt_of_row))], device=device)
        self._row_B = torch.arange(len(prompt_of_row), device=device)
        self._S = max(length_P, default=0)
        self._prompt_mask = self.prompts.hidden_beyond(torch.tensor(length_P, device=device), self._S)

    def at_prefill(self, first: int, count: int, length: int) -> None:
        """The next pass fills prompts first … first + count, padded to length."""
        self.prompts.define(length)
        self._prefilled = slice(first, first + count)

    def at_decode(self, position_B: Tensor, length: int) -> None:
        """The next pass adds one token to each row in use, at these of its own positions, all below length."""
        self.rows.define(length)
        self._prefilled, self._position_B, self._T = None, position_B, length
        self._row_mask = self.rows.hidden_beyond(position_B + 1, length)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        if self._prefilled is not None:
            length = key.shape[2]
            self.prompts.keys[layer_idx, self._prefilled, :, :length] = key
            self.prompts.values[layer_idx, self._prefilled, :, :length] = value
            return key, value
        keys, values = self.rows.keys[layer_idx], self.rows.values[layer_idx]
        keys[self._row_B, :, self._position_B] = key[:, :, 0]
        values[self._row_B, :, self._position_B] = value[:, :, 0]
        rows = len(self._row_B)
        return keys[:rows, :, : self._T], values[:rows, :, : self._T]

    def attend(self, layer: int, query_BHGD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, scale: float) -> Tensor:
        """[B, H, G, D]: a decode step's attention of each row over its prompt and its own tokens."""
        own, own_lse = attention_parts(query_BHGD, key_BHTD, value_BHTD, self._row_mask, scale)
        (P, N), (_, H, G, D) = self._row_PN.shape, query_BHGD.shape
        query = query_BHGD[self._row_PN].transpose(1, 2).reshape(P, H, N * G, D)
        keys, values = (x[layer, :P, :, : self._S] for x in (self.prompts.keys, self.prompts.values))
        prompt, prompt_lse = attention_parts(query, keys, values, self._prompt_mask, scale)
        prompt, prompt_lse = (
            x.view(P, H, N, G, -1).transpose(1, 2).reshape(P * N, H, G, -1)[self._place_B] for x in (prompt, prompt_lse)
        )
        return torch.lerp(own, prompt, torch.sigmoid(prompt_lse - own_lse[..., None]).to(own.dtype))


def attention_parts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(attention, log-normaliser of its scores, fp32) of queries that all see the same keys, but for the mask."""
    if query.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # the public one keeps the normaliser
        return flash(query, key, value, attn_mask=mask, scale=scale)
    return dense_attention_parts(query, key, value, mask, scale)


def dense_attention_parts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The same on any device."""
    scores = (query.float() @ key.float().mT).mul_(scale).add_(mask)
    return (scores.softmax(-1) @ value.float()).to(value.dtype), scores.logsumexp(-1)


def attend(module, query, key, value, attention_mask, scaling=None, kv_cache: KVCache | None = None, **_kwargs):
    """Transformers' attention. A prefill or a score is causal over rows padded on the right, so no token sees the
    padding; a decode step names its cache. The query heads of one key head are folded into the length there."""
    if kv_cache is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None
    rows, heads, _, head_dim = query.shape
    folded = query.view(rows, key.shape[1], heads // key.shape[1], head_dim)
    out = kv_cache.attend(module.layer_idx, folded, key, value, scaling)
    return out.reshape(rows, 1, heads, head_dim), None


AttentionInterface.register(ATTENTION, attend)
