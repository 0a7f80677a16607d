"""What a teacher is, and what can be said of it before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlpost.types import Prompt

BACKENDS = ("swap", "engine")
SLOTS = ("own", "shared")
UPDATES = ("static", "ema", "trust_region", "periodic")
APIS = ("sglang", "vllm")
# What two models must share to run with each other's weights; one that differs gets a model of its own.
SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "rope_theta",
    "rope_parameters",
    "rms_norm_eps",
)


@dataclass
class TeacherConfig:
    """update: what the teacher's weights do.

    static: never move: the initial policy, `model`, `models` or `url`. ema: move by `alpha`, the student's share
    (0 < alpha ≤ 1), after each optimizer `step` or once per rollout `batch` (`every`). periodic: become the student's
    every `interval` steps. trust_region: are the initial policy's, and its logits are mixed with the live student's
    under the teacher's prompt, (1 − student_share)·reference + student_share·student.

    model: a Hugging Face directory with the student's tokenizer. models: {source: directory}; a sample's
    `metadata.source` says who teaches it. backend: swap, the trainer's own model with the teacher's weights (a
    checkpoint of another shape gets a model of its own); or engine, an inference engine on each rank, which tells the
    log-probs of the sampled tokens and of the teacher's own top-k ids. engine: which one: the teacher's `own`, of the
    same kind and settings as the student's, or the student's, `shared` in turns.

    url: a server that scores the sampled tokens alone. api: sglang (`/generate`) or vllm (`/v1/completions` with
    `prompt_logprobs`). served_model: its name there, null for the only one. api_key_env: the environment variable that
    holds its key. check_tokenizer: compare tokenizers at launch. Each rank keeps `requests_at_once` requests of
    `sequences_per_request` sequences in flight; one that fails or takes longer than timeout_s seconds is repeated
    `retries` times, after retry_wait_s seconds and then twice as long each time, ten at most. Sequences without a
    usable answer teach nothing; more than max_bad_payload_fraction of a step's are an error.
    """

    update: str = "ema"
    alpha: float = 0.01
    every: str = "step"
    interval: int = 10
    student_share: float = 0.1
    model: str | None = None
    models: Mapping[str, str] | None = None
    backend: str = "swap"
    engine: str = "own"
    url: str | None = None
    api: str = "sglang"
    served_model: str | None = None
    api_key_env: str | None = None
    check_tokenizer: bool = True
    sequences_per_request: int = 8
    requests_at_once: int = 8
    timeout_s: float = 120.0
    retries: int = 3
    retry_wait_s: float = 1.0
    max_bad_payload_fraction: float = 0.05

    def __post_init__(self) -> None:
        mistakes = list(self._mistakes())
        if mistakes:
            raise ValueError("\n".join(mistakes))

    @property
    def own_engine(self) -> bool:
        """Whether it scores on an engine beside the student's."""
        return self.backend == "engine" and self.engine == "own"

    def _mistakes(self) -> Iterator[str]:
        for name, allowed in (
            ("update", UPDATES),
            ("every", ("step", "batch")),
            ("backend", BACKENDS),
            ("engine", SLOTS),
            ("api", APIS),
        ):
            if getattr(self, name) not in allowed:
                yield f"teacher.{name}={getattr(self, name)} is not allowed; allowed are {', '.join(allowed)}"
        if not 0 < self.alpha <= 1:
            yield f"teacher.alpha={self.alpha} is not allowed; it is the student's share, 0 < alpha ≤ 1"
        if not 0 <= self.student_share < 1:
            yield f"teacher.student_share={self.student_share} is not allowed; 0 ≤ student_share < 1"
        if not isinstance(self.interval, int) or self.interval < 1:
            yield f"teacher.interval={self.interval} is not allowed; it is a number of steps, at least 1"
        if self.models is not None and not self.models:
            yield "teacher.models is empty: {source: directory, …}"
        given = [name for name in ("model", "models", "url") if getattr(self, name) is not None]
        if len(given) > 1:
            together = " and ".join(f"teacher.{name}" for name in given)
            yield f"{together} are not allowed together: one teacher, one for each source, or a server"
        elif given and self.update != "static":
            yield (
                f"teacher.update={self.update} is not allowed with teacher.{given[0]}: another model's weights are no "
                "average of the student's; choose teacher.update=static"
            )
        yield from self._engine_mistakes()
        yield from self._server_mistakes()

    def _engine_mistakes(self) -> Iterator[str]:
        if self.backend != "engine":
            if self.engine != "own":
                yield f"teacher.engine={self.engine} has no use with teacher.backend={self.backend}; it needs engine"
            return
        if self.update == "trust_region":
            yield (
                "teacher.update=trust_region is not allowed with teacher.backend=engine: it mixes logits, of which an "
                "engine tells none; choose teacher.backend=swap, or another update"
            )
        for name in ("models", "url"):
            if getattr(self, name) is not None:
                yield (
                    f"teacher.{name}={getattr(self, name)} is not allowed with teacher.backend=engine, which holds one "
                    "teacher's weights; choose teacher.backend=swap"
                )

    def _server_mistakes(self) -> Iterator[str]:
        if self.url is not None and not str(self.url).startswith(("http://", "https://")):
            yield f"teacher.url={self.url} is not allowed; it begins with http:// or https://"
        for name in ("sequences_per_request", "requests_at_once"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                yield f"teacher.{name}={getattr(self, name)} is not allowed; it is a whole number of at least 1"
        if not isinstance(self.retries, int) or self.retries < 0:
            yield f"teacher.retries={self.retries} is not allowed; it is a whole number of at least 0"
        if not self.timeout_s > 0:
            yield f"teacher.timeout_s={self.timeout_s} is not allowed; it is a number of seconds above 0"
        if not self.retry_wait_s >= 0:
            yield f"teacher.retry_wait_s={self.retry_wait_s} is not allowed; it is a number of seconds"
        if not 0 <= self.max_bad_payload_fraction <= 1:
            yield (
                f"teacher.max_bad_payload_fraction={self.max_bad_payload_fraction} is not allowed; it is a share of a "
                "step's sequences, 0 … 1"
            )

    def external(self) -> dict[str | None, str]:
        """Source (None: any) → directory of the weights that do not come from the policy."""
        return dict(self.models or {}) if self.model is None else {None: self.model}


def build_teacher_config(values: Mapping[str, Any]) -> TeacherConfig:
    known = [f.name for f in fields(TeacherConfig)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"teacher has no field {', '.join(map(repr, unknown))}. There are: {', '.join(known)}")
    return TeacherConfig(**values)


def shape_differences(directory: str, model: str) -> list[str]:
    """Why the model in `directory` cannot run in the place of `model`; empty where it can."""
    theirs, ours = _read(directory), _read(model)
    return [
        f"{key} {theirs.get(key)} (model.path: {ours.get(key)})" for key in SHAPE if theirs.get(key) != ours.get(key)
    ]


def directory_mistakes(config: TeacherConfig, model: str) -> Iterator[str]:
    """One line for each external teacher that cannot teach the student; reads the config files alone."""
    for source, directory in config.external().items():
        field = "teacher.model" if source is None else f"teacher.models.{source}"
        if not (Path(directory) / "config.json").is_file():
            yield f"{field}={directory} has no config.json: it is a Hugging Face model directory"
            continue
        if not (Path(model) / "config.json").is_file():
            continue  # said of model.path
        theirs, ours = (_read(path).get("vocab_size") for path in (directory, model))
        if theirs != ours:
            yield (
                f"{field}={directory} has a vocabulary of {theirs} ids, model.path one of {ours}: teacher and student "
                "must share tokenizer and vocabulary"
            )


def _read(directory: str) -> dict[str, Any]:
    return json.loads((Path(directory) / "config.json").read_text())


def check_external(config: TeacherConfig, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt]) -> None:
    """ValueError where a teacher has another tokenizer, or where a source of the data has no teacher; asks the server
    of `url` too, TeacherServerError where it does not answer."""
    from transformers import AutoTokenizer

    from rlpost.teacher.client import ScoringClient

    if config.url is not None:
        ScoringClient(config).check(tokenizer)
    for directory in config.external().values():
        if AutoTokenizer.from_pretrained(directory).get_vocab() != tokenizer.get_vocab():
            raise ValueError(f"the teacher {directory} has another tokenizer than the student: vocabularies differ")
    if config.models is not None:
        for prompt in prompts:
            if prompt.source not in config.models:
                raise ValueError(
                    f"prompt {prompt.id} has source {prompt.source!r}, for which teacher.models has no teacher. There "
                    f"are: {', '.join(config.models)}"
                )
