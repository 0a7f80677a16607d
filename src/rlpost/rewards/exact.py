"""The response, or what stands in a tag of it, equals the answer."""

from __future__ import annotations

import re

from rlpost.rewards import RewardResult
from rlpost.types import Sample


class Exact:
    """1 where the response equals the row's answer, else 0. White space at the ends and its amount never count.

    tag: compare the last `<tag>…</tag>` of the response instead; none is a format error. ignore_case: letters'
    case does not count.
    """

    def __init__(self, *, tag: str | None = None, ignore_case: bool = False):
        self.tag, self.ignore_case = tag, ignore_case

    def __call__(self, sample: Sample) -> RewardResult:
        if sample.prompt.answer is None:
            raise ValueError(f"prompt {sample.prompt.id} has no answer to compare with (data.answer_key)")
        text = sample.response
        if self.tag:
            name = re.escape(self.tag)
            found = re.findall(rf"<{name}>((?:(?!<{name}>).)*?)</{name}>", text, re.DOTALL)
            if not found:
                cut = " It was cut off at the length limit." if sample.finish_reason == "length" else ""
                return RewardResult(0.0, f"The response has no <{self.tag}>…</{self.tag}> block.{cut}", format_ok=False)
            text = found[-1]
        format_ok = True if self.tag else None
        if self._normal(text) == self._normal(str(sample.prompt.answer)):
            return RewardResult(1.0, format_ok=format_ok)
        if sample.finish_reason == "length":
            return RewardResult(0.0, "The response was cut off at the length limit.", format_ok=format_ok)
        return RewardResult(0.0, "The answer is wrong.", format_ok=format_ok)

    def _normal(self, text: str) -> str:
        joined = " ".join(text.split())
        return joined.casefold() if self.ignore_case else joined
