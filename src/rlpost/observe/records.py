"""rollouts/{train,eval}/{step}.jsonl: what was asked, answered, rewarded and taught, one sample a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from rlpost.observe.metrics import append, drop_lines
from rlpost.types import Sample

KINDS = ("train", "eval")


class RolloutRecords:
    """Appends samples to the step's file, all of a call in one piece, so that it can be read while the run goes on."""

    def __init__(self, run_dir: str | Path):
        self.directory = Path(run_dir) / "rollouts"

    def write(self, kind: Literal["train", "eval"], step: int, samples: Iterable[Sample], **fields: Any) -> None:
        """fields: written into every line, such as the name of an eval set."""
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is not allowed; allowed are {', '.join(KINDS)}")
        path = self.directory / kind / f"{step}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Answers and details are whatever a data set or a reward puts there: shown as text where JSON has no word.
        lines = [json.dumps({**fields, **record(sample)}, ensure_ascii=False, default=str) for sample in samples]
        append(path, "".join(line + "\n" for line in lines))

    def drop_eval(self, step: int, name: str) -> None:
        """Forget what was written of an eval set: it is evaluated again."""
        path = self.directory / "eval" / f"{step}.jsonl"
        if path.exists():
            drop_lines(path, lambda row: row["eval"] == name)

    def cut_after(self, step: int) -> None:
        """Remove the files of later steps (all, for −1): a resumed run writes them again."""
        for path in self.directory.glob("*/*.jsonl"):
            if path.stem.isdigit() and int(path.stem) > step:
                path.unlink()


def record(sample: Sample) -> dict[str, Any]:
    """A sample as one JSON object; lengths are in tokens."""
    tokens = len(sample.response_ids)
    return {
        "prompt_id": sample.prompt.id,
        "group_id": sample.group_id,
        "index": sample.index,
        "source": sample.prompt.source,
        "prompt": sample.prompt.messages,
        "response": sample.response,
        "answer": sample.prompt.answer,
        "reward": sample.reward,
        "reward_details": sample.reward_details,
        "format_ok": sample.format_ok,
        "feedback": sample.feedback,
        "teacher_prompt": sample.teacher_messages,
        "teacher_info": sample.teacher_info,
        "distill_mask": sample.distill_mask,
        "loss_mask_fraction": sum(sample.loss_mask) / tokens if tokens else 0.0,
        "prompt_tokens": len(sample.prompt.ids),
        "response_tokens": tokens,
        "teacher_prompt_tokens": len(sample.teacher_prompt_ids) if sample.teacher_prompt_ids is not None else None,
        "finish_reason": sample.finish_reason,
        "version": sample.version,
    }
