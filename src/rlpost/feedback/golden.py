"""SDPO for static question and answer sets (SciKnowEval, tool use)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlpost.feedback.sdpo import Parts, SDPOFeedback
from rlpost.types import Sample

if TYPE_CHECKING:
    from rlpost.config.schema import Config


class GoldenAnswerSDPOFeedback(SDPOFeedback):
    """SDPO whose feedback is about form alone: cut off, or not in the form asked for.

    task_feedback: what the reward says of a well-formed wrong answer is told too. In either case feedback that holds
    the golden answer is withheld (`teacher_info["withheld"]`): it never enters a prompt.
    """

    def __init__(self, *, task_feedback: bool = False, **sdpo: Any):
        super().__init__(**sdpo)
        self.task_feedback = task_feedback

    def validate(self, cfg: Config) -> None:
        super().validate(cfg)
        if cfg.data.answer_key is None:
            raise ValueError("data.answer_key is not set: GoldenAnswerSDPOFeedback keeps the answer out of its prompts")

    def _route(self, sample: Sample, group: Sequence[Sample], shown: Mapping[int, str]) -> Parts:
        feedback, sample.feedback = sample.feedback, self._allowed(sample)
        try:
            return super()._route(sample, group, shown)
        finally:
            sample.feedback = feedback

    def _allowed(self, sample: Sample) -> str | None:
        about_form = sample.finish_reason == "length" or sample.format_ok is False
        if not sample.feedback or not (about_form or self.task_feedback):
            return None
        return None if tells_answer(sample.feedback, sample.prompt.answer) else sample.feedback

    def _info(self, sample: Sample, route: str, **info: Any) -> dict[str, Any]:
        withheld = bool(sample.feedback) and self._allowed(sample) is None
        return super()._info(sample, route, withheld=withheld, **info)


def tells_answer(text: str, answer: Any) -> bool:
    """Whether the answer stands in the text, by itself: a letter as a capital (an article "A" included: rather too
    much withheld than too little) or in brackets, anything else as words in any case."""
    golden = str(answer if answer is not None else "").strip()
    if not golden:
        return False
    if len(golden) == 1 and golden.isalpha():
        letter = re.escape(golden.upper())
        return re.search(rf"(?<!\w){letter}(?!\w)|[(\[\"'`]\s*{letter.lower()}\s*[)\]\"'`]", text) is not None
    words = r"\s+".join(re.escape(word) for word in golden.split())
    return re.search(rf"(?<!\w){words}(?!\w)", text, re.IGNORECASE) is not None
