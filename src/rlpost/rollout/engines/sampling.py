"""From logits to tokens: one uniform number per token, turned into a token by the inverse of the distribution's CDF.

A row's token depends on its own logits, parameters and uniform number alone, never on its neighbours in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlpost.rollout.engine import SamplingParams

FIRST_CANDIDATES = 256  # of a top-p search, before it widens


@dataclass
class SamplingTable:
    """The sampling parameters of all requests of a call, on the device."""

    temperature_R: Tensor
    top_p_R: Tensor
    top_k_R: Tensor
    greedy_R: Tensor
    any_scaled: bool
    any_cut: bool
    any_greedy: bool
    all_greedy: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingTable:
        greedy = [p.temperature == 0 for p in params]
        temperature = [p.temperature or 1.0 for p in params]
        top_k = [vocab_size if p.top_k == -1 else min(p.top_k, vocab_size) for p in params]
        return cls(
            temperature_R=torch.tensor(temperature, device=device),
            top_p_R=torch.tensor([p.top_p for p in params], device=device),
            top_k_R=torch.tensor(top_k, device=device),
            greedy_R=torch.tensor(greedy, device=device),
            any_scaled=any(t != 1.0 for t in temperature),
            any_cut=any((p.top_p < 1 or k < vocab_size) and not g for p, k, g in zip(params, top_k, greedy)),
            any_greedy=any(greedy),
            all_greedy=all(greedy),
        )


def sample_tokens(logits_BV: Tensor, uniform_B: Tensor, table: SamplingTable, row_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row: (ids [B] int64, log-probs [B] float32 over the whole vocabulary at the temperature).

    uniform_B: in [0, 1). row_B: each row's index into the table.
    """
    logits_BV = logits_BV.float()
    if table.any_scaled:
        logits_BV = logits_BV / table.temperature_R[row_B, None]
    probs_BV = logits_BV.softmax(-1)
    if table.all_greedy:
        ids_B = logits_BV.argmax(-1)
    else:
        ids_B = _invert_cdf(probs_BV, uniform_B)
        if table.any_cut:
            top_p_B, top_k_B = table.top_p_R[row_B], table.top_k_R[row_B]
            whole_B = (top_p_B >= 1) & (top_k_B >= probs_BV.shape[-1])
            # A row that is not cut must not widen the search for the others.
            cut_B = _sample_cut(probs_BV, uniform_B, top_p_B.masked_fill(whole_B, 0.0), top_k_B)
            ids_B = torch.where(whole_B, ids_B, cut_B)
        if table.any_greedy:
            ids_B = torch.where(table.greedy_R[row_B], logits_BV.argmax(-1), ids_B)
    return ids_B, probs_BV.gather(-1, ids_B[:, None])[:, 0].log()


def _invert_cdf(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds uniform · total; an index of weight 0 is never chosen."""
    cdf_BV = weights_BV.cumsum(-1)
    index_B = torch.searchsorted(cdf_BV, uniform_B[:, None] * cdf_BV[:, -1:], right=True)[:, 0]
    return index_B.clamp_(max=weights_BV.shape[-1] - 1)


def _sample_cut(probs_BV: Tensor, uniform_B: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor:
    """Sample from the tokens that are among the top_k and in the smallest set with a mass of top_p.

    Only as many candidates are sorted as the flattest row needs, not the vocabulary.
    """
    vocab_size = probs_BV.shape[-1]
    count = FIRST_CANDIDATES
    while True:
        count = min(count, vocab_size)
        top_BK, ids_BK = probs_BV.topk(count, dim=-1)
        mass_BK = top_BK.cumsum(-1)
        if count == vocab_size or bool(((mass_BK[:, -1] >= top_p_B) | (top_k_B <= count)).all()):
            break
        count *= 8
    rank_K = torch.arange(count, device=probs_BV.device)
    kept_BK = (mass_BK - top_BK < top_p_B[:, None]) & (rank_K < top_k_B[:, None])
    choice_B = _invert_cdf(top_BK * kept_BK, uniform_B)
    return ids_BK.gather(-1, choice_B[:, None])[:, 0]
