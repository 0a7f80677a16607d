"""Plain text with named slots, and the words of a teacher prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

# Slots that each template must have.
SLOTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "user": ("question", "demonstration", "feedback", "instruction"),
        "demonstration": ("demonstration",),
        "feedback": ("feedback",),
        "instruction": (),
        "truncated": (),
        "format_error": (),
    }
)
DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "user": "{question}\n\n{demonstration}\n\n{feedback}\n\n{instruction}",
        "demonstration": "Here is a response to this question that was judged correct:\n\n{demonstration}",
        "feedback": "An earlier attempt at this question was not accepted. What was said about it:\n\n{feedback}",
        "instruction": "Now answer the original question yourself, in the form that it asks for.",
        "truncated": "The response was cut off at the length limit before it was finished: come to the answer sooner.",
        "format_error": "The response was not in the form that the question asks for.",
    }
)
SLOT = re.compile(r"\{(\w+)\}")


def merged(
    given: Mapping[str, str] | None, slots: Mapping[str, tuple[str, ...]], defaults: Mapping[str, str]
) -> dict[str, str]:
    """The defaults with the given templates in their place. ValueError with every unknown name and missing slot."""
    given = given or {}
    mistakes = [
        f"feedback.templates.{name} does not exist; there are {', '.join(slots)}" for name in given if name not in slots
    ]
    templates = {**defaults, **{name: text for name, text in given.items() if name in slots}}
    for name, text in templates.items():
        if not isinstance(text, str):
            mistakes.append(f"feedback.templates.{name} is {type(text).__name__}, not text")
            continue
        present = SLOT.findall(text)
        mistakes += [
            f"feedback.templates.{name} lacks the slot {{{slot}}}" for slot in slots[name] if slot not in present
        ]
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return templates


def fill(template: str, **values: str) -> str:
    """The template with its slots filled. An empty value takes its slot and the white space behind it away; braces
    that are no slot of these stay as they are, and what is filled in is not looked at again."""
    for slot in [slot for slot, value in values.items() if not value]:
        template = re.sub(rf"\{{{slot}\}}\s*", "", template)
    return SLOT.sub(lambda match: values.get(match.group(1), match.group(0)), template).strip()
