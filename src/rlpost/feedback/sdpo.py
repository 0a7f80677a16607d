"""Self-distillation policy optimisation (SDPO, Hübotter et al. 2026): the teacher reads a successful sibling's response
as a demonstration, or the environment's feedback on this attempt."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlpost.data.templates import without_special_tokens
from rlpost.feedback.base import EnvironmentFeedback, last_user
from rlpost.feedback.templates import DEFAULTS, SLOTS, fill, merged
from rlpost.rewards import RewardResult
from rlpost.types import Message, Sample

if TYPE_CHECKING:
    from rlpost.config.schema import Config

DEMONSTRATIONS = ("first", "random", "shortest")
THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
# A template may have opened the block in the prompt, so that the response only closes it.
OPENED_IN_PROMPT = re.compile(r"\A(?:(?!<think>).)*?</think>\s*", re.DOTALL)
GAP = "\n[…]\n"  # stands where a text was cut


@dataclass
class Parts:
    """What a teacher prompt adds to the question."""

    route: str
    demonstration: str = ""
    feedback: str = ""


class SDPOFeedback(EnvironmentFeedback):
    """Routes each sample: a different successful sample of its group as a demonstration; else, for a failure, its
    feedback; else nothing to teach (distill_mask 0).

    demonstration: which success is shown, `first` or `shortest` by sample, or `random` from a stream of its own seed.
    strip_thinking: closed <think> blocks are left out of it. feedback_with_solution: a failure's feedback stands
    beside the demonstration. demonstrate_self: a success without a successful sibling is shown its own response.
    max_teacher_prompt_tokens: what is longer loses the middle of its demonstration, then of its feedback, never
    question or instruction. templates: replace some of `rlpost.feedback.templates.DEFAULTS`.
    """

    def __init__(
        self,
        teacher_prompt_key: str | None = None,
        success_reward_threshold: float = 1.0,
        demonstration: str = "first",
        strip_thinking: bool = True,
        feedback_with_solution: bool = False,
        demonstrate_self: bool = False,
        max_teacher_prompt_tokens: int = 10240,
        templates: Mapping[str, str] | None = None,
    ):
        super().__init__(teacher_prompt_key, success_reward_threshold)
        if demonstration not in DEMONSTRATIONS:
            raise ValueError(
                f"feedback.demonstration={demonstration} is not allowed; allowed are {', '.join(DEMONSTRATIONS)}"
            )
        if max_teacher_prompt_tokens < 1:
            raise ValueError(
                f"feedback.max_teacher_prompt_tokens={max_teacher_prompt_tokens} is not allowed; at least 1"
            )
        self.demonstration, self.strip_thinking = demonstration, strip_thinking
        self.feedback_with_solution, self.demonstrate_self = feedback_with_solution, demonstrate_self
        self.max_teacher_prompt_tokens = max_teacher_prompt_tokens
        self.templates = merged(templates, SLOTS, DEFAULTS)

    def validate(self, cfg: Config) -> None:
        if self.max_teacher_prompt_tokens <= cfg.data.max_prompt_tokens:
            raise ValueError(
                f"feedback.max_teacher_prompt_tokens={self.max_teacher_prompt_tokens} leaves no room beside a question "
                f"of data.max_prompt_tokens={cfg.data.max_prompt_tokens}"
            )

    def record(self, sample: Sample, reward: RewardResult | Mapping[str, Any] | float) -> None:
        """Of a failure: that it was cut off, else that its form is wrong, else what the task says."""
        super().record(sample, reward)
        if isinstance(reward, RewardResult):
            score, format_ok = reward.score, reward.format_ok
        elif isinstance(reward, Mapping):
            score, format_ok = reward["score"], reward.get("format_ok")
        else:
            score, format_ok = reward, None
        if score >= self.success_reward_threshold:
            return
        if sample.finish_reason == "length":
            sample.feedback = self.templates["truncated"]
        elif format_ok is False:
            sample.feedback = sample.feedback or self.templates["format_error"]

    def group_prompts(self, group: Sequence[Sample]) -> None:
        shown = {sample.index: self._shown(sample) for sample in group if self.is_success(sample)}
        for sample in group:
            parts = self._route(sample, group, shown)
            if not sample.response_ids or not (parts.demonstration or parts.feedback):
                self._mask(sample, parts.route)
            else:
                self._fit(sample, parts)

    def _route(self, sample: Sample, group: Sequence[Sample], shown: Mapping[int, str]) -> Parts:
        success = self.is_success(sample)
        feedback = "" if success else self._clean(sample.feedback or "")
        siblings = [other for other in group if other.index != sample.index and shown.get(other.index)]
        if siblings:
            chosen = self._choose(siblings, sample)
            return Parts("demonstration", shown[chosen.index], feedback if self.feedback_with_solution else "")
        if success:
            return Parts("self", shown[sample.index]) if self.demonstrate_self else Parts("none")
        return Parts("feedback", feedback=feedback) if feedback else Parts("none")

    def _choose(self, siblings: Sequence[Sample], sample: Sample) -> Sample:
        if self.demonstration == "shortest":
            return min(siblings, key=lambda other: (len(other.response_ids), other.index))
        if self.demonstration == "random":
            # Of the sample alone, so that the choice is the same on any number of ranks.
            return random.Random(f"demonstration {self.seed} {sample.group_id} {sample.index}").choice(siblings)
        return siblings[0]

    def _shown(self, sample: Sample) -> str:
        text = sample.response
        if self.strip_thinking:
            text = OPENED_IN_PROMPT.sub("", THINKING.sub("", text))
        return self._clean(text)

    def _clean(self, text: str) -> str:
        return without_special_tokens(self._tokenizer(), text).strip()

    def _messages(self, sample: Sample, parts: Parts) -> list[Message]:
        """The student's messages with the last user message made richer."""
        messages = [dict(message) for message in sample.prompt.messages]
        user = messages[last_user(messages)]
        blocks = {
            name: fill(self.templates[name], **{name: text}) if (text := getattr(parts, name)) else ""
            for name in ("demonstration", "feedback")
        }
        instruction = self.templates["instruction"]
        user["content"] = fill(self.templates["user"], question=user["content"], instruction=instruction, **blocks)
        return messages

    def _fit(self, sample: Sample, parts: Parts) -> None:
        """Render, cutting what is too long: the demonstration first, then the feedback."""
        messages = self._messages(sample, parts)
        ids = self._render(messages)
        cut = len(ids) > self.max_teacher_prompt_tokens
        for name in ("demonstration", "feedback") if cut else ():
            whole = getattr(parts, name)
            keep = self._count(whole)
            while keep > 0 and len(ids) > self.max_teacher_prompt_tokens:
                keep = max(0, keep - (len(ids) - self.max_teacher_prompt_tokens))
                setattr(parts, name, self._without_middle(whole, keep))
                messages = self._messages(sample, parts)
                ids = self._render(messages)
        if len(ids) > self.max_teacher_prompt_tokens or not (parts.demonstration or parts.feedback):
            self._mask(sample, "too_long", cut=True)
            return
        told = {"demonstration": bool(parts.demonstration), "feedback": bool(parts.feedback)}
        self._teach(sample, messages, ids, parts.route, cut=cut, **told)

    def _count(self, text: str) -> int:
        return len(self._tokenizer()(text, add_special_tokens=False)["input_ids"])

    def _without_middle(self, text: str, keep: int) -> str:
        """About `keep` tokens of the text, half from its beginning and half from its end."""
        if keep < 2:
            return ""
        spans = self._tokenizer()(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        head, tail = spans[(keep + 1) // 2 - 1][1], spans[len(spans) - keep // 2][0]
        return text[:head] + GAP + text[tail:]
