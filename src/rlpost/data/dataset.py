"""From rows to prompts, and the order in which a run sees them."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpost.config.schema import DataConfig
from rlpost.data.reading import BadRows, DataError, Row, read_rows, require_column
from rlpost.data.templates import conversation, render_batch
from rlpost.imports import import_object
from rlpost.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

OPTIONAL_KEYS = ("answer_key", "system_key", "source_key")


class PromptDataset:
    """Prompts in a seeded order that does not depend on the number of ranks.

    rows: what `read_rows` takes, `cfg.train` by default. responses: rows are whole conversations to learn from (SFT):
    chat messages that end with the assistant, or a prompt with a `response` column (or a text answer).
    without_response: a turn of the assistant at their end is left out, for the model to say (evaluation during SFT).
    `counts` says how many rows were read, kept and left out, by reason.
    """

    def __init__(
        self,
        cfg: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        rows: str | Path | Sequence[str | Path | Mapping[str, Any]] | None = None,
        seed: int = 0,
        *,
        responses: bool = False,
        without_response: bool = False,
    ):
        if cfg.last_batch not in ("wrap", "drop", "keep"):
            raise ValueError(f"data.last_batch={cfg.last_batch} is not allowed; allowed are wrap, drop, keep")
        if cfg.on_long_prompt not in ("error", "skip"):
            raise ValueError(f"data.on_long_prompt={cfg.on_long_prompt} is not allowed; allowed are error, skip")
        self.cfg, self.seed = cfg, seed
        bad = BadRows(cfg.on_bad_row)
        read = read_rows(cfg.train if rows is None else rows, bad)
        self.prompts = _prompts(cfg, tokenizer, read, bad, responses, without_response)
        self.counts = Counter({"rows": len(read), "prompts": len(self.prompts), **bad.counts})
        if not self.prompts:
            raise DataError(f"no prompts left of {len(read)} rows ({read[0].where} …): {dict(bad.counts)}")
        if bad.counts:
            left_out = sum(bad.counts.values())  # broken JSON never was a row that was read
            of = left_out + len(self.prompts)
            log.warning("%d of %d rows left out: %s (log.txt names each)", left_out, of, dict(bad.counts))
        self._epoch, self._offset = 0, 0
        self._fingerprint = _fingerprint(self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def order(self, epoch: int) -> list[int]:
        """Positions in `prompts`, in the order of this epoch."""
        if not self.cfg.shuffle:
            return list(range(len(self)))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self)).tolist()

    def next_batch(self, n: int) -> list[Prompt]:
        """The next n prompts. At the end of an epoch `data.last_batch` decides: wrap fills up from the next epoch,
        keep returns what is left, drop leaves it out."""
        if n < 1:
            raise ValueError(f"a batch has at least one prompt, not {n}")
        if self.cfg.last_batch == "drop" and n > len(self):
            raise DataError(f"data.last_batch=drop with {len(self)} prompts never fills a batch of {n}")
        batch: list[Prompt] = []
        while len(batch) < n:
            order = self.order(self._epoch)
            taken = order[self._offset : self._offset + n - len(batch)]
            batch += [self.prompts[i] for i in taken]
            self._offset += len(taken)
            if len(batch) == n:
                break
            left, self._epoch, self._offset = len(batch), self._epoch + 1, 0
            if self.cfg.last_batch == "drop":
                batch = []
            elif self.cfg.last_batch == "keep" and left:
                break
        return batch

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "seed": self.seed,
            "prompts": len(self),
            "fingerprint": self._fingerprint,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. ValueError where seed or data are others: the order would be another one."""
        for key, own in (("seed", self.seed), ("prompts", len(self)), ("fingerprint", self._fingerprint)):
            if state[key] != own:
                raise ValueError(
                    f"the checkpoint's data order has {key} {state[key]}, this run has {own}: not the same data"
                )
        self._epoch, self._offset = int(state["epoch"]), int(state["offset"])


def _prompts(
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    bad: BadRows,
    responses: bool,
    without_response: bool,
) -> list[Prompt]:
    _require_columns(cfg, rows)
    transform = import_object(cfg.transform) if isinstance(cfg.transform, str) else cfg.transform
    kept: list[tuple[int, Row, list[Message]]] = []
    for number, row in enumerate(rows):
        try:
            kept.append((number, row, _messages(cfg, row, transform, responses, without_response)))
        except DataError as error:
            bad.report(row.where, str(error))
    if responses:
        rendered = [conversation(tokenizer, messages, **cfg.chat_template_kwargs)[0] for _, _, messages in kept]
    else:
        rendered = render_batch(tokenizer, [messages for *_, messages in kept], **cfg.chat_template_kwargs)
    prompts = []
    for (number, row, messages), ids in zip(kept, rendered):
        if len(ids) > cfg.max_prompt_tokens:
            if cfg.on_long_prompt == "error":
                raise DataError(f"{row.where}: {len(ids)} tokens, data.max_prompt_tokens={cfg.max_prompt_tokens}")
            bad.counts["too long"] += 1
        else:
            prompts.append(_prompt(cfg, number, row, messages, ids))
    return prompts


def _require_columns(cfg: DataConfig, rows: Sequence[Row]) -> None:
    require_column(rows, "data.prompt_key", cfg.prompt_key)
    for name in OPTIONAL_KEYS:
        key = getattr(cfg, name)
        # The defaults name columns that many sets lack; one that the user named must be there.
        if key is not None and key != getattr(DataConfig, name):
            require_column(rows, f"data.{name}", key)


def _messages(
    cfg: DataConfig,
    row: Row,
    transform: Callable[[Any, dict[str, Any]], Any] | None,
    responses: bool,
    without_response: bool,
) -> list[Message]:
    prompt = row.values.get(cfg.prompt_key)
    if transform is not None:
        prompt = transform(prompt, dict(row.values))
    if prompt is None or (isinstance(prompt, str | list) and not prompt):
        raise DataError(f"no prompt: column {cfg.prompt_key!r} is missing or empty")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = _checked(prompt, cfg.prompt_key)
    system = row.values.get(cfg.system_key) if cfg.system_key else None
    if system:
        if not isinstance(system, str):
            raise DataError(f"wrong type: column {cfg.system_key!r} holds {type(system).__name__}, not text")
        if messages[0]["role"] == "system":
            raise DataError(f"two system messages: one in {cfg.prompt_key!r}, one in {cfg.system_key!r}")
        messages.insert(0, {"role": "system", "content": system})
    if responses:
        return _with_response(cfg, row, messages)
    if without_response and len(messages) > 1 and messages[-1]["role"] == "assistant":
        messages.pop()
    if messages[-1]["role"] == "assistant":
        raise DataError("the prompt ends with an assistant turn: there is nothing to generate")
    return messages


def _checked(prompt: Any, key: str) -> list[Message]:
    if not isinstance(prompt, list):
        raise DataError(f"wrong type: column {key!r} holds {type(prompt).__name__}, not text or chat messages")
    for message in prompt:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(f"wrong type: a message of {key!r} is {{role: text, content: text}}, not {message!r:.80}")
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _with_response(cfg: DataConfig, row: Row, messages: list[Message]) -> list[Message]:
    if messages[0]["role"] == "assistant":
        raise DataError("the conversation begins with an assistant turn")
    if messages[-1]["role"] == "assistant":
        return messages
    response = row.values.get("response")
    if response is None and cfg.answer_key:
        response = row.values.get(cfg.answer_key)
    if not isinstance(response, str) or not response:
        raise DataError("no response: neither an assistant turn, nor a text in column 'response' or data.answer_key")
    return [*messages, {"role": "assistant", "content": response}]


def _prompt(cfg: DataConfig, number: int, row: Row, messages: list[Message], ids: list[int]) -> Prompt:
    named = {cfg.prompt_key, cfg.answer_key, cfg.system_key, cfg.source_key}
    source = row.values.get(cfg.source_key) if cfg.source_key else None
    return Prompt(
        id=number,
        messages=messages,
        ids=ids,
        answer=row.values.get(cfg.answer_key) if cfg.answer_key else None,
        source=None if source is None else str(source),
        metadata={key: value for key, value in row.values.items() if key not in named},
    )


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.asarray([prompt.id, *prompt.ids], dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]
