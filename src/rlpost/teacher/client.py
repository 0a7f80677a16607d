"""Log-probs of given tokens from an HTTP server. Token ids go in and come back, so nothing is tokenised again.

`sglang`: POST /generate with `input_ids`, `return_logprob`, `logprob_start_len`. `vllm`: POST /v1/completions with a
prompt of ids and `prompt_logprobs`. Both score at temperature 1.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlpost.data.templates import decode_all
from rlpost.teacher.config import TeacherConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # HTTP answers of a server that is busy, starting or ill
FAILURES = (OSError, http.client.HTTPException, json.JSONDecodeError)  # timeouts and refused connections are OSErrors
LONGEST_WAIT_S = 10.0
PROBE = "Two trains, 12.5 km apart, meet at 9:41.\n\n\tdef f(x): return x**2  # Größe, 速度, naïve\n"


class TeacherServerError(RuntimeError):
    """The server does not answer, or not what was asked."""


class ScoringClient:
    """`teacher.url` and what TeacherConfig says of it. `check` comes before `score`, at launch."""

    def __init__(self, config: TeacherConfig):
        self.config, self.url = config, str(config.url).rstrip("/")
        self.headers = {"Content-Type": "application/json"}
        if config.api_key_env is not None:
            if config.api_key_env not in os.environ:
                raise ValueError(f"teacher.api_key_env={config.api_key_env}: there is no such environment variable")
            self.headers["Authorization"] = f"Bearer {os.environ[config.api_key_env]}"

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Asks what is served, compares tokenizers on a text with many of the student's tokens, and scores its start.

        Raises TeacherServerError, ValueError for another model or tokenizer.
        """
        tokens = range(0, len(tokenizer), max(1, len(tokenizer) // 200))
        text = PROBE + decode_all(tokenizer, [list(tokens)])[0]
        ids = tokenizer.encode(text, add_special_tokens=False)
        if self.config.check_tokenizer:
            theirs = self._tokenize(text)
            if theirs != ids:
                at = next((i for i, (a, b) in enumerate(zip(theirs, ids)) if a != b), min(len(theirs), len(ids)))
                raise ValueError(
                    f"{self} serves {self.served_model!r}, which has another tokenizer than the student: token {at} of "
                    f"a test text is {theirs[at : at + 1]} there and {ids[at : at + 1]} here"
                )
        (row,) = self.score([ids[:32]], [1])
        if isinstance(row, str):
            raise TeacherServerError(f"{self} cannot score: {row}")

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float] | str]:
        """Log-probs of ids[start:] for each sequence (start ≥ 1), or in words what is wrong with the answer.

        Raises TeacherServerError after all retries, and where the server refuses a request.
        """
        size = self.config.sequences_per_request
        cuts = [slice(at, at + size) for at in range(0, len(sequences), size)]
        with ThreadPoolExecutor(self.config.requests_at_once, thread_name_prefix="teacher") as pool:
            futures = [pool.submit(self._score_request, sequences[cut], starts[cut]) for cut in cuts]
            try:
                return [row for future in futures for row in future.result()]
            finally:
                for future in futures:
                    future.cancel()  # the rest, where one has failed

    def __str__(self) -> str:
        return f"teacher.url={self.config.url}"

    def _score_request(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float] | str]:
        ask = _ask_sglang if self.config.api == "sglang" else _ask_vllm
        path, body, read = ask(sequences, starts, self.served_model)
        answer = self._call(path, body)
        try:
            rows = read(answer)
            if len(rows) != len(sequences):
                raise ValueError(f"{len(rows)} answers to {len(sequences)} sequences")
            return [_checked(row, ids[start:]) for row, ids, start in zip(rows, sequences, starts)]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise TeacherServerError(
                f"{self}: POST {path} answers in another form than teacher.api={self.config.api} does "
                f"({type(error).__name__}: {error}): {json.dumps(answer)[:200]}"
            ) from error

    @cached_property
    def served_model(self) -> str:
        """`teacher.served_model`, or the only one that there is."""
        answer, wanted = self._call("/v1/models"), self.config.served_model
        try:
            names = [model["id"] for model in answer["data"]]
        except (KeyError, TypeError) as error:
            raise TeacherServerError(f"{self}: GET /v1/models lists no models: {str(answer)[:200]}") from error
        if wanted is None and len(names) != 1:
            raise ValueError(f"{self} serves {', '.join(names) or 'nothing'}: choose one as teacher.served_model")
        if wanted is not None and wanted not in names:
            raise ValueError(f"teacher.served_model={wanted} is not what {self} serves: {', '.join(names)}")
        return names[0] if wanted is None else wanted

    def _tokenize(self, text: str) -> list[int]:
        body = {"model": self.served_model, "prompt": text, "add_special_tokens": False}
        try:
            return list(self._call("/tokenize", body)["tokens"])
        except (TeacherServerError, KeyError, TypeError) as error:
            raise TeacherServerError(
                f"{error}\n(to compare tokenizers; teacher.check_tokenizer=false goes without)"
            ) from error

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON answer to a GET, or to a POST of `body`."""
        what = f"{self}: {'GET' if body is None else 'POST'} {path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        attempts, failure = self.config.retries + 1, ""
        for attempt in range(attempts):
            if attempt:
                wait = min(self.config.retry_wait_s * 2 ** (attempt - 1), LONGEST_WAIT_S)
                log.warning("%s failed (%s); once more in %.1f s", what, failure, wait)
                time.sleep(wait)
            try:
                with urllib.request.urlopen(request, timeout=self.config.timeout_s) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                failure = f"HTTP {error.code}: {error.read()[:300].decode(errors='replace')}"
                if error.code not in TRY_AGAIN:
                    raise TeacherServerError(f"{what} was refused: {failure}") from error
            except urllib.error.URLError as error:
                failure = str(error.reason)
            except FAILURES as error:
                failure = str(error) or type(error).__name__
        raise TeacherServerError(f"{what} had no answer, {attempts} times (is the server up?); the last: {failure}")


Scores = list[tuple[Any, Any]]  # (token id, log-prob) as the server said them
Ask = tuple[str, dict[str, Any], Callable[[Any], list[Scores]]]  # path, body, what its answer means


def _ask_sglang(sequences: Sequence[Sequence[int]], starts: Sequence[int], model: str) -> Ask:
    body = {
        "input_ids": [list(ids) for ids in sequences],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": [start - 1 for start in starts],  # the first entry from there has no log-prob
    }

    def read(answer: Any) -> list[Scores]:
        entries = [output["meta_info"]["input_token_logprobs"][1:] for output in answer]
        return [[(entry[1], entry[0]) for entry in row] for row in entries]

    return "/generate", body, read


def _ask_vllm(sequences: Sequence[Sequence[int]], starts: Sequence[int], model: str) -> Ask:
    prompts = [list(ids) for ids in sequences]
    body = {"model": model, "prompt": prompts, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1}

    def read(answer: Any) -> list[Scores]:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        rows = []
        for choice, ids, start in zip(choices, prompts, starts, strict=True):
            # Each position has its most likely token too, so ours is looked up.
            scored = choice["prompt_logprobs"][start:]
            found = [(i, entry.get(str(i))) for i, entry in zip(ids[start:], scored)]
            rows.append([(i if entry else None, entry and entry["logprob"]) for i, entry in found])
        return rows

    return "/v1/completions", body, read


def _checked(scores: Scores, ids: Sequence[int]) -> list[float] | str:
    """The log-probs of exactly these ids, or what is wrong. −inf is one; NaN and +inf are not."""
    if len(scores) != len(ids):
        return f"{len(scores)} scores for {len(ids)} response tokens"
    for number, ((scored, logprob), asked) in enumerate(zip(scores, ids)):
        if scored != asked:
            return f"score {number} is of token {scored}, not of {asked}"
        if not isinstance(logprob, int | float) or math.isnan(logprob) or logprob == math.inf:
            return f"the log-prob of response token {number} is {logprob}"
    return [float(logprob) for _, logprob in scores]
