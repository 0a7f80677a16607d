"""Rewards: `fn(sample) -> float | RewardResult`, or the group form `fn(samples) -> list`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RewardResult:
    """What a reward says of one response.

    score: the reward; 0.0 is a reward, None is not.
    feedback: why, in words that a teacher may read. Never the golden answer.
    format_ok: False where the response could not be read at all.
    """

    score: float
    feedback: str | None = None
    format_ok: bool | None = None
    details: dict[str, float] = field(default_factory=dict)
