"""Scores that came from elsewhere: those that cannot be used teach nothing, and are counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.types import Sample

Payload = Mapping | str  # name → a tensor [R, …] for `sample.tokens`, or in words why there is none


class PayloadError(RuntimeError):
    """Too many sequences have no usable scores."""


def use_payloads(samples: Sequence[Sample], payloads: Sequence[Payload], blank: Mapping[str, Tensor]) -> None:
    """Each sample's fields into its `tokens`; where there are none, `distill_mask` 0 and the rows of `blank`."""
    for sample, payload in zip(samples, payloads, strict=True):
        if isinstance(payload, str):
            count = len(sample.response_ids)
            payload = {name: row.expand(count, *row.shape[1:]).clone() for name, row in blank.items()}
            payload["distill_mask"] = torch.zeros(count)
        sample.tokens |= payload


def count_payloads(payloads: Sequence[object], most: float, who: str) -> dict[str, float]:
    """Metrics of all ranks' payloads, strings being bad ones. Raises PayloadError where more than the share `most` of
    them are bad, with the first reason."""
    bad = [payload for payload in payloads if isinstance(payload, str)]
    if len(bad) > most * len(payloads):
        raise PayloadError(
            f"{who}: {len(bad)} of {len(payloads)} sequences have no usable scores "
            f"(teacher.max_bad_payload_fraction={most}); the first: {bad[0]}"
        )
    return {"teacher/scored_sequences": float(len(payloads)), "teacher/bad_payloads": float(len(bad))}
