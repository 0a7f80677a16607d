"""Rewards on length alone, to stand beside the one that counts: `reward: {rewards: [{name: choice}, {name: overlong,
max_tokens: 256, buffer: 64}]}`."""

from __future__ import annotations

from rlpost.types import Sample


class Overlong:
    """DAPO's soft punishment (https://arxiv.org/abs/2503.14476): 0 up to max_tokens − buffer response tokens, from
    there linearly down to −1 at max_tokens."""

    def __init__(self, *, max_tokens: int, buffer: int):
        if not 0 < buffer <= max_tokens:
            raise ValueError(f"reward.buffer={buffer} is not allowed; it is 1 … max_tokens={max_tokens}")
        self.max_tokens, self.buffer = max_tokens, buffer

    def __call__(self, sample: Sample) -> float:
        over = len(sample.response_ids) - (self.max_tokens - self.buffer)
        return -min(max(over / self.buffer, 0.0), 1.0)


class Length:
    """Minus the share of max_tokens that the response takes; give it a small weight."""

    def __init__(self, *, max_tokens: int):
        if max_tokens < 1:
            raise ValueError(f"reward.max_tokens={max_tokens} is not allowed; it is at least 1")
        self.max_tokens = max_tokens

    def __call__(self, sample: Sample) -> float:
        return -len(sample.response_ids) / self.max_tokens
