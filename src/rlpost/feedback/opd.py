"""On-policy distillation (Agarwal et al. 2023, arXiv 2306.13649): the teacher reads the student's own prompt."""

from __future__ import annotations

from rlpost.feedback.base import EnvironmentFeedback


class OPDFeedback(EnvironmentFeedback):
    """The base class's defaults, under a name for configurations."""
