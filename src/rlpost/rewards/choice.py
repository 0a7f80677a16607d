"""Multiple choice: the letter in the last `<answer>` block."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlpost.rewards import RewardResult
from rlpost.types import Sample

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.IGNORECASE | re.DOTALL)
OPTION_LINE = re.compile(r"^[ \t]*\(?([A-Z])[ \t]*[:.)][ \t]*(\S.*)$", re.MULTILINE)

# A letter stands alone where neither a word, a number with its unit, nor an apostrophe touches it.
BEFORE, AFTER = r"(?<![\w'’°º\-])", r"(?![\w'’\-])"
BRACKETED = re.compile(r"[(\[][ \t]*([A-Za-z])[ \t]*[)\]]")
LABEL = re.compile(rf"^[ \t]*([A-Za-z])[ \t]*(?:[:)]|\.(?!\w))|{BEFORE}([A-Z])[ \t]*[:)]", re.MULTILINE)
NAMED = re.compile(rf"\b(?:option|choice|answer|letter)s?(?:\s+is)?\s*:?\s*([A-Za-z]){AFTER}", re.IGNORECASE)
CAPITAL = re.compile(rf"{BEFORE}([A-Z]){AFTER}")
# "A protein folds" has an article (and "I think" a pronoun), "A or B" and "A is right" have a letter.
PROSE = re.compile(
    r"[ \t]+(?!(?:or|and|nor|not|is|was|are|because|since|as|but|with|only|seems|would|must|should)\b)[A-Za-z]{2,}"
)
LATEX = re.compile(r"\\(?:boxed|text(?:bf|rm|tt|it)?|math(?:rm|bf|tt|it))\s*\{([^{}]*)\}")
MARKUP = re.compile(r"[*`$]|\\[()\[\]]")


class Choice:
    """1 where the response's last `<answer>` block names the right option, else 0.

    The letter may be written "B", "b", "(B)", "B: 0.8", `\\boxed{\\text{B}}`; an article "a" in prose is no letter.
    No block, no letter out of the row's own options, or two different ones: 0 and a format error.
    options: the letters where neither the prompt has `A: …` lines nor the metadata a column `options` or `choices`.
    boxed: the last `\\boxed{…}` counts without a block; by default where the prompt asks for it.
    """

    def __init__(self, *, options: Sequence[str] | None = None, boxed: bool | None = None):
        self.options, self.boxed = options, boxed

    def __call__(self, sample: Sample) -> RewardResult:
        options = row_options(sample) or dict.fromkeys(self.options or (), "")
        golden = str(sample.prompt.answer or "").strip().strip("().:").upper()
        if golden not in options:
            raise ValueError(
                f"prompt {sample.prompt.id}: the answer {sample.prompt.answer!r} is none of {list(options)}"
            )
        block = self._block(sample)
        if block is None:
            if sample.finish_reason == "length":
                return _format_error("The response was cut off at the length limit before it gave an answer.")
            return _format_error("The response has no <answer>…</answer> block.")
        letters = named_letters(block, options)
        if not letters:
            return _format_error("The answer block does not name one of the options by its letter.")
        if len(letters) > 1:
            return _format_error("The answer block names more than one option; it must hold exactly one letter.")
        if letters == [golden]:
            return RewardResult(1.0, format_ok=True)
        return RewardResult(0.0, _wrong(letters[0], options), format_ok=True)

    def _block(self, sample: Sample) -> str | None:
        blocks = ANSWER.findall(sample.response)
        if blocks:
            return blocks[-1]
        asked = self.boxed
        if asked is None:
            asked = any("\\boxed" in message["content"] for message in sample.prompt.messages)
        return _last_boxed(sample.response) if asked else None


def row_options(sample: Sample) -> dict[str, str]:
    """Letter → text of the row's options: from the metadata, or the last run A, B, C … of `L: option` lines."""
    for column in ("options", "choices"):
        given = sample.prompt.metadata.get(column)
        if isinstance(given, Mapping) and "label" in given:
            return dict(zip(map(str, given["label"]), map(str, given.get("text", given["label"]))))
        if isinstance(given, Mapping):
            return {str(label).upper(): str(text) for label, text in given.items()}
        if isinstance(given, list | tuple) and given:
            return {chr(ord("A") + i): str(text) for i, text in enumerate(given)}
    question = next((m["content"] for m in reversed(sample.prompt.messages) if m["role"] == "user"), "")
    run: dict[str, str] = {}
    for label, text in OPTION_LINE.findall(question):
        if label == "A":
            run = {"A": text.strip()}
        elif run and ord(label) == ord("A") + len(run):
            run[label] = text.strip()
    return run if len(run) > 1 else {}


def named_letters(block: str, options: Mapping[str, str]) -> list[str]:
    """The different option letters that an answer block names, in their order."""
    text = _plain(block, options).strip(" \t\r\n.,;!\"'")
    found = [(m.start(), m.group(1)) for m in BRACKETED.finditer(text)]
    found += [(m.start(), m.group(1) or m.group(2)) for m in LABEL.finditer(text)]
    found += [(m.start(1), m.group(1)) for m in NAMED.finditer(text) if not _is_prose(text, m)]
    label = BRACKETED.match(text) or LABEL.match(text)
    if label is None:
        found += [(m.start(), m.group(1)) for m in CAPITAL.finditer(text) if not _is_prose(text, m)]
    # Behind a leading "B: " stands the option's text, in which a lone capital is a unit or a name; only where it is
    # nothing but a letter, it is one more answer.
    alone = text[label.end() if label else 0 :].strip()
    if len(alone) == 1:
        found.append((len(text), alone))
    return list(dict.fromkeys(letter.upper() for _, letter in sorted(found) if letter.upper() in options))


def _is_prose(text: str, match: re.Match[str]) -> bool:
    return match.group(1) in "AaIi" and PROSE.match(text, match.end()) is not None


def _plain(block: str, options: Mapping[str, str]) -> str:
    """Without LaTeX and Markdown around the words, and without an option's text behind its own letter."""
    before = None
    while before != block:
        before, block = block, LATEX.sub(r" \1 ", block)
    block = MARKUP.sub(" ", block)
    for label, text in options.items():
        restated = MARKUP.sub(" ", text).strip()
        if restated:
            block = re.sub(rf"{BEFORE}({label})\s*[:.)]\s*{re.escape(restated)}(?!\w)", r"\1: ", block)
    return block


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start : end + 1]
    return None


def _format_error(why: str) -> RewardResult:
    return RewardResult(0.0, why, format_ok=False)


def _wrong(letter: str, options: Mapping[str, str]) -> str:
    if len(options) < 3:
        return "The answer is wrong."  # of two options, the wrong one would tell the right one
    return f"Option {letter} is not the right answer."
