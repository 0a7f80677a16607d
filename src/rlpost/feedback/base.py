"""What an environment says of a response, and the prompt that tells it to the teacher."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlpost.data.templates import render
from rlpost.rewards import RewardResult
from rlpost.types import Message, Sample, groups

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlpost.config.schema import Config


class EnvironmentFeedback:
    """Plain on-policy distillation: records the reward's feedback, and lets the teacher read the student's prompt.

    Strategies override the three hooks: `validate` (rules of the whole configuration, before anything is loaded),
    `record` (one sample's reward) and `teacher_prompts` (whole groups). A teacher prompt is built as chat messages
    and rendered once; the student's prompt and its response ids stay as they are.

    teacher_prompt_key: the data column with privileged text, for strategies that read one.
    success_reward_threshold: a sample with at least this reward is a success.
    """

    def __init__(self, teacher_prompt_key: str | None = None, success_reward_threshold: float = 1.0):
        if isinstance(success_reward_threshold, bool) or not math.isfinite(success_reward_threshold):
            raise ValueError(f"feedback.success_reward_threshold={success_reward_threshold} is not a finite number")
        self.teacher_prompt_key = teacher_prompt_key
        self.success_reward_threshold = float(success_reward_threshold)
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.seed = 0
        self.chat_template_kwargs: dict[str, Any] = {}
        self._rendered: dict[str, list[int]] = {}  # one group's: siblings often give their teacher the same to read

    def bind(
        self, tokenizer: PreTrainedTokenizerBase, seed: int = 0, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Once, before the first `teacher_prompts`."""
        self.tokenizer, self.seed = tokenizer, seed
        self.chat_template_kwargs = dict(chat_template_kwargs or {})

    def validate(self, cfg: Config) -> None:
        """ValueError with one line for each mistake in the configuration."""

    def record(self, sample: Sample, reward: RewardResult | Mapping[str, Any] | float) -> None:
        """Keeps a reward's feedback text on the sample; blank text is none."""
        if isinstance(reward, Mapping):
            text = reward.get("feedback")
        else:
            text = reward.feedback if isinstance(reward, RewardResult) else None
        sample.feedback = text if text and text.strip() else None

    def teacher_prompts(self, samples: Sequence[Sample]) -> None:
        """Sets teacher_messages, teacher_prompt_ids, distill_mask and teacher_info of every sample.

        The samples may be of many groups, in any order, but all of a group must be there.
        """
        for group in groups(samples):
            self._rendered.clear()
            self.group_prompts(group)

    def group_prompts(self, group: Sequence[Sample]) -> None:
        """One group's samples, by index."""
        for sample in group:
            self._use_student_prompt(sample, "student")

    def is_success(self, sample: Sample) -> bool:
        if sample.reward is None:
            raise ValueError(f"sample {sample.group_id}/{sample.index} has no reward yet: judge before teaching")
        return sample.reward >= self.success_reward_threshold

    def _use_student_prompt(self, sample: Sample, route: str) -> None:
        self._teach(sample, sample.prompt.messages, list(sample.prompt.ids), route)

    def _teach(self, sample: Sample, messages: Sequence[Message], ids: list[int], route: str, **info: Any) -> None:
        sample.teacher_messages, sample.teacher_prompt_ids = list(messages), ids
        sample.distill_mask = 1.0 if sample.response_ids else 0.0
        sample.teacher_info = self._info(sample, route, tokens=len(ids), **info)

    def _mask(self, sample: Sample, route: str, **info: Any) -> None:
        """Nothing to teach here: the sample stays in the batch and gives no gradient."""
        sample.teacher_messages, sample.teacher_prompt_ids, sample.distill_mask = None, None, 0.0
        sample.teacher_info = self._info(sample, route, **info)

    def _info(self, sample: Sample, route: str, **info: Any) -> dict[str, Any]:
        success = sample.reward is not None and sample.reward >= self.success_reward_threshold
        defaults = {"demonstration": False, "feedback": False, "cut": False, "tokens": 0}
        return {"route": route, "success": success, **defaults, **info}

    def _render(self, messages: Sequence[Message]) -> list[int]:
        key = repr(messages)
        if key not in self._rendered:
            self._rendered[key] = render(self._tokenizer(), messages, **self.chat_template_kwargs)
        return list(self._rendered[key])

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise RuntimeError(f"{type(self).__name__}.bind(tokenizer) comes before teacher_prompts")
        return self.tokenizer


def last_user(messages: Sequence[Message]) -> int:
    """Position of the last user message."""
    for i in reversed(range(len(messages))):
        if messages[i]["role"] == "user":
            return i
    raise ValueError(f"no user message among the roles {[message['role'] for message in messages]}")


def feedback_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """How the teacher prompts of a step (of all ranks' samples) came out; fractions are over samples, and
    `success_group_fraction` over groups."""
    if not samples:
        return {}
    infos = [sample.teacher_info for sample in samples]
    grouped = groups(samples)
    taught = [info["tokens"] for info in infos if info["tokens"]]
    return {
        "sdpo/success_group_fraction": sum(any(s.teacher_info["success"] for s in g) for g in grouped) / len(grouped),
        "sdpo/success_sample_fraction": _fraction(infos, "success"),
        "sdpo/demonstration_fraction": _fraction(infos, "demonstration"),
        "sdpo/feedback_fraction": _fraction(infos, "feedback"),
        "sdpo/distill_fraction": sum(sample.distill_mask > 0 for sample in samples) / len(samples),
        "sdpo/cut_fraction": _fraction(infos, "cut"),
        "sdpo/fallback_fraction": sum(info["route"] == "fallback" for info in infos) / len(infos),
        "sdpo/teacher_prompt_tokens/mean": sum(taught) / len(taught) if taught else 0.0,
        "sdpo/teacher_prompt_tokens/max": float(max(taught, default=0)),
    }


def _fraction(infos: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(bool(info[key]) for info in infos) / len(infos)
