"""Makes `train.jsonl`, `eval.jsonl` and a summary from what a public data set looks like."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlpost.data.reading import BadRows, DataError, Row, read_rows

LEVEL = "L3"  # SciKnowEval's level of reasoning; its multiple-choice rows are what the papers train on
DOMAINS = ("biology", "chemistry", "material", "physics")

SYSTEM = """\
You are given a question and {count} options, one of which is right. Answer in this form:
<reasoning>
your reasoning
</reasoning>
<answer>
the letter of one option ({letters})
</answer>
Write nothing but the letter inside the answer block."""


class Unsuitable(Exception):
    """A sound row that is not of the kind asked for (another level, no multiple choice): counted, no mistake."""


def prepare(
    kind: str,
    src: str | Path | Sequence[str | Path],
    out: str | Path,
    eval_ratio: float = 0.1,
    seed: int = 42,
    on_bad_row: str = "error",
) -> dict[str, Any]:
    """Read `src` (a file, a folder, several), convert, split by a seeded permutation and write to the folder `out`.

    Returns the summary that is also in `out/summary.json`: rows read and left out by reason, train and eval rows,
    answers, and the prompts that stand in both (`overlap`). Raises DataError for a broken row (file and line; with
    on_bad_row="skip" it is left out and counted), for 0 rows, and ValueError for an unknown kind or a ratio outside
    [0, 1).
    """
    if kind not in KINDS:
        raise ValueError(f"there is no kind {kind!r}; there are {', '.join(KINDS)}")
    if not 0 <= eval_ratio < 1:
        raise ValueError(f"eval_ratio={eval_ratio} is not allowed; it is at least 0 and below 1")
    bad = BadRows(on_bad_row, remedy="--on-bad-row skip")
    read = read_rows(src, bad)
    rows, unsuitable = _convert(read, KINDS[kind], bad)
    left_out = unsuitable + bad.counts
    if not rows:
        raise DataError(f"no {kind} row among {len(read)} rows of {src}: {dict(left_out)}")
    held_out = _held_out(len(rows), eval_ratio, seed)
    train = [row for i, row in enumerate(rows) if i not in held_out]
    evaluation = [rows[i] for i in sorted(held_out)]
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("eval", evaluation)):
        _write(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part))
    summary = {
        "kind": kind,
        "source": str(src),
        "seed": seed,
        "read": len(read),
        "left_out": dict(left_out),
        "train": len(train),
        "eval": len(evaluation),
        "overlap": _overlap(train, evaluation),
        "answers": dict(sorted(Counter(str(row["answer"])[:40] for row in rows).items()))
        if kind == "sciknoweval"
        else {},
        "files": [str(folder / "train.jsonl"), str(folder / "eval.jsonl")],
    }
    _write(folder / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return summary


def sciknoweval(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """One SciKnowEval row: as published (question, choices, answerKey, type, domain, details), or already converted
    (idx, kind, prompt, answer, system), which passes through."""
    if "prompt" in row and "answer" in row and "question" not in row:
        if row.get("kind", "mcq") != "mcq":
            raise Unsuitable(f"kind {row['kind']}")
        if not row["prompt"] or not row["answer"]:
            raise DataError("no prompt or no answer")
        return dict(row)
    level = (row.get("details") or {}).get("level", row.get("level"))
    if level != LEVEL:
        raise Unsuitable(f"level {level}")
    if not str(row.get("type", "")).startswith("mcq"):
        raise Unsuitable(f"type {row.get('type')}")
    labels, texts = _choices(row.get("choices"))
    answer = str(row.get("answerKey") or "").strip()
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise DataError("no question")
    if answer not in labels:
        raise DataError(f"answerKey {answer!r} is none of the options {', '.join(labels)}")
    options = "\n".join(f"{label}: {text}" for label, text in zip(labels, texts))
    domain = str(row.get("domain") or "").lower()
    return {
        "idx": number,
        "kind": "mcq",
        "prompt": f"{question.strip()}\n\n{options}",
        "answer": answer,
        "system": SYSTEM.format(count=len(labels), letters=f"{', '.join(labels[:-1])} or {labels[-1]}"),
        # "Materials" and "Material" are both in use.
        "source": next((d for d in DOMAINS if domain.startswith(d)), domain),
    }


def _choices(choices: Any) -> tuple[list[str], list[str]]:
    if isinstance(choices, Mapping):
        labels, texts = list(choices.get("label") or []), list(choices.get("text") or [])
    elif isinstance(choices, list) and all(isinstance(choice, Mapping) for choice in choices):
        labels, texts = [c.get("label") for c in choices], [c.get("text") for c in choices]
    else:
        labels, texts = [], []
    if len(labels) != len(texts) or len(labels) < 2:
        raise DataError(
            f"choices has {len(labels)} labels and {len(texts)} texts: at least two of each, as many of both"
        )
    return [str(label).strip() for label in labels], [str(text) for text in texts]


def question_answer(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Any JSONL with a prompt (or question) and an answer; of a worked solution (`… #### 42`, as GSM8K has it) the
    answer is what stands behind the last ####, and the whole is kept as `solution`."""
    prompt = row.get("prompt") or row.get("question")
    if not prompt:
        raise DataError(f"no prompt: neither 'prompt' nor 'question' among the columns {', '.join(row)}")
    if row.get("answer") is None:
        raise DataError(f"no answer: the columns are {', '.join(row)}")
    answer, extra = row["answer"], {}
    if isinstance(answer, str) and "####" in answer:
        answer, extra = answer.rsplit("####", 1)[1].strip(), {"solution": answer}
    others = {key: value for key, value in row.items() if key not in ("prompt", "question", "answer")}
    return {"idx": number, "prompt": prompt, "answer": answer, **extra, **others}


KINDS: dict[str, Callable[[Mapping[str, Any], int], dict[str, Any]]] = {
    "sciknoweval": sciknoweval,
    "jsonl": question_answer,
}


def _convert(
    read: Sequence[Row], convert: Callable[[Mapping[str, Any], int], dict[str, Any]], bad: BadRows
) -> tuple[list[dict[str, Any]], Counter[str]]:
    rows: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    for row in read:
        try:
            rows.append(convert(row.values, len(rows)))
        except Unsuitable as reason:
            left_out[str(reason)] += 1
        except DataError as error:
            bad.report(row.where, str(error))
    return rows, left_out


def _held_out(rows: int, ratio: float, seed: int) -> set[int]:
    """At least one row where a part is asked for, and never all of them."""
    count = min(max(round(rows * ratio), 1), rows - 1) if ratio > 0 else 0
    return set(np.random.default_rng(seed).permutation(rows)[:count].tolist())


def _overlap(train: Sequence[Mapping[str, Any]], evaluation: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seen = {json.dumps(row["prompt"], sort_keys=True) for row in train}
    both = [row for row in evaluation if json.dumps(row["prompt"], sort_keys=True) in seen]
    return {"prompts": len(both), "idx": [row.get("idx") for row in both[:20]]}


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
