"""Feedback strategies: from rewards and siblings to teacher prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpost.feedback.base import EnvironmentFeedback, feedback_metrics
from rlpost.feedback.golden import GoldenAnswerSDPOFeedback
from rlpost.feedback.opd import OPDFeedback
from rlpost.feedback.opsd import OPSDFeedback
from rlpost.feedback.sdpo import SDPOFeedback
from rlpost.imports import check_keywords, resolve

__all__ = [
    "EnvironmentFeedback",
    "GoldenAnswerSDPOFeedback",
    "OPDFeedback",
    "OPSDFeedback",
    "SDPOFeedback",
    "build_feedback",
    "feedback_metrics",
]

BUILTIN = {"opd": OPDFeedback, "opsd": OPSDFeedback, "sdpo": SDPOFeedback, "golden": GoldenAnswerSDPOFeedback}


def build_feedback(spec: Mapping[str, Any] | EnvironmentFeedback) -> EnvironmentFeedback:
    """From `{name: sdpo, …}` or `{_target_: import.path, …}`; the other keys are the strategy's arguments.

    Raises TypeError for one that it does not know, naming the accepted ones, and ValueError for a wrong value.
    """
    if isinstance(spec, EnvironmentFeedback):
        return spec
    cls, kwargs = resolve(spec, BUILTIN, "feedback")
    if not (isinstance(cls, type) and issubclass(cls, EnvironmentFeedback)):
        raise TypeError(f"feedback: {cls!r} is no subclass of rlpost.feedback.EnvironmentFeedback")
    check_keywords(cls, kwargs, "feedback")
    return cls(**kwargs)
