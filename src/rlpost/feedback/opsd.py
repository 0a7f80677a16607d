"""On-policy self-distillation: the teacher also reads privileged text that the data set holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rlpost.feedback.base import EnvironmentFeedback, last_user
from rlpost.feedback.templates import fill, merged
from rlpost.types import Sample

SLOTS = MappingProxyType({"user": ("privileged",)})
DEFAULTS = MappingProxyType(
    {
        "user": "{question}\n\nHere is what is known about the solution:\n\n{privileged}\n\n"
        "Now answer the original question yourself, in the form that it asks for."
    }
)


class OPSDFeedback(EnvironmentFeedback):
    """The teacher prompt comes from the column `teacher_prompt_key` (required; "answer" is the row's answer, whatever
    its column is called).

    Text is put into the template `user` (slots {question}, {privileged}) in place of the last user message; chat
    messages are the teacher prompt as they stand. A row without it falls back to the student's prompt, counted as
    route "fallback".
    """

    def __init__(
        self,
        teacher_prompt_key: str | None = None,
        success_reward_threshold: float = 1.0,
        templates: Mapping[str, str] | None = None,
    ):
        super().__init__(teacher_prompt_key, success_reward_threshold)
        if not teacher_prompt_key:
            raise ValueError(
                "feedback.teacher_prompt_key is not set: OPSDFeedback needs the column with privileged text"
            )
        self.templates = merged(templates, SLOTS, DEFAULTS)

    def group_prompts(self, group: Sequence[Sample]) -> None:
        for sample in group:
            key = self.teacher_prompt_key
            privileged = sample.prompt.answer if key == "answer" else sample.prompt.metadata.get(key)
            if privileged is None or (isinstance(privileged, str) and not privileged.strip()):
                self._use_student_prompt(sample, "fallback")
                continue
            messages = self._messages(sample, privileged)
            self._teach(sample, messages, self._render(messages), "privileged")

    def _messages(self, sample: Sample, privileged: Any) -> list[dict[str, str]]:
        if isinstance(privileged, list):
            return [{"role": message["role"], "content": message["content"]} for message in privileged]
        if not isinstance(privileged, str):
            raise ValueError(
                f"prompt {sample.prompt.id}: column {self.teacher_prompt_key!r} holds {type(privileged).__name__}, "
                "not text or chat messages"
            )
        messages = [dict(message) for message in sample.prompt.messages]
        user = messages[last_user(messages)]
        user["content"] = fill(self.templates["user"], question=user["content"], privileged=privileged)
        return messages
