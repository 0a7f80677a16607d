"""Relatives of GRPO that differ in what they choose: each is GRPO with other defaults, all fields stay settable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlpost.algorithms.grpo import GRPO


@dataclass
class DrGRPO(GRPO):
    """Dr. GRPO (https://arxiv.org/abs/2503.20783): no division by the group's standard deviation nor by a response's
    length, which favour easy or hard questions and long wrong answers."""

    name: ClassVar[str] = "dr_grpo"
    reduction: str = "constant"
    normalize_std: bool = False


@dataclass
class DAPO(GRPO):
    """DAPO (https://arxiv.org/abs/2503.14476): a wider clip upwards, the mean over tokens. Its other two halves stand
    in their own groups: `rollout.filter: nonzero_std` (dynamic sampling) and `reward: overlong`."""

    name: ClassVar[str] = "dapo"
    clip_high: float | None = 0.28


@dataclass
class GSPO(GRPO):
    """GSPO (https://arxiv.org/abs/2507.18071): one ratio for each sequence, clipped far more narrowly than a token's,
    and every sequence counting alike."""

    name: ClassVar[str] = "gspo"
    reduction: str = "sequence_mean"
    policy_loss: str = "gspo"
    clip_low: float = 3e-4
    clip_high: float | None = 4e-4


@dataclass
class CISPO(GRPO):
    """CISPO (https://arxiv.org/abs/2506.13585): the importance weight is clipped, from above alone, and no token
    loses its gradient."""

    name: ClassVar[str] = "cispo"
    policy_loss: str = "cispo"
    clip_low: float = 1.0
    clip_high: float | None = 4.0


@dataclass
class SAPO(GRPO):
    """SAPO (https://arxiv.org/abs/2511.20347): a soft gate in the place of the clip, falling faster for negative
    advantages."""

    name: ClassVar[str] = "sapo"
    reduction: str = "sequence_mean"
    policy_loss: str = "sapo"


@dataclass
class RLOO(GRPO):
    """RLOO (https://arxiv.org/abs/2402.14740): REINFORCE on whole responses; the baseline of a sample is the mean
    reward of its siblings."""

    name: ClassVar[str] = "rloo"
    reduction: str = "sequence_sum"
    advantage: str = "rloo"
    policy_loss: str = "reinforce"


@dataclass
class Reinforce(GRPO):
    """REINFORCE with a running mean of the rewards as its baseline; a group may be a single sample."""

    name: ClassVar[str] = "reinforce"
    reduction: str = "sequence_sum"
    advantage: str = "reinforce"
    policy_loss: str = "reinforce"
