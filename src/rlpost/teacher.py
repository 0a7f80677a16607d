"""The teacher: other weights of the same network that score the student's responses under a richer prompt.

SDPO's self-teacher (the EMA is fp32, seeded from and fed by the optimizer's fp32 masters), a frozen checkpoint, or one
for each source of data. The `swap` backend runs the trainer's own model with the teacher's weights for the length of
the teach phase.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlpost.data.batching import write_back
from rlpost.policy.logits import Head, teacher_fields

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlpost.data.batching import Batcher, Update
    from rlpost.policy.protocol import Policy
    from rlpost.types import MicroBatch, Prompt
    from rlpost.weights.snapshots import SnapshotStore

TAG = "teacher"
UPDATES = ("static", "ema", "trust_region", "periodic")
# What two models must share to run with each other's weights.
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

    static: never move: the initial policy, `model`, or `models`. ema: move by `alpha`, the student's share
    (0 < alpha ≤ 1), after each optimizer `step` or once per rollout `batch` (`every`). periodic: become the student's
    every `interval` steps. trust_region: are the initial policy's, and its logits are mixed with the live student's
    under the teacher's prompt, (1 − student_share)·reference + student_share·student.
    model: a Hugging Face directory of the student's shape and tokenizer. models: {source: directory}; a sample's
    `metadata.source` says who teaches it. backend: swap.
    """

    update: str = "ema"
    alpha: float = 0.01
    every: str = "step"
    interval: int = 10
    student_share: float = 0.1
    model: str | None = None
    models: Mapping[str, str] | None = None
    backend: str = "swap"

    def __post_init__(self) -> None:
        mistakes = list(self._mistakes())
        if mistakes:
            raise ValueError("\n".join(mistakes))

    def _mistakes(self) -> Iterator[str]:
        for name, allowed in (("update", UPDATES), ("every", ("step", "batch")), ("backend", ("swap",))):
            if getattr(self, name) not in allowed:
                yield f"teacher.{name}={getattr(self, name)} is not allowed; allowed are {', '.join(allowed)}"
        if not 0 < self.alpha <= 1:
            yield f"teacher.alpha={self.alpha} is not allowed; it is the student's share, 0 < alpha ≤ 1"
        if not 0 <= self.student_share < 1:
            yield f"teacher.student_share={self.student_share} is not allowed; 0 ≤ student_share < 1"
        if not isinstance(self.interval, int) or self.interval < 1:
            yield f"teacher.interval={self.interval} is not allowed; it is a number of steps, at least 1"
        if self.model is not None and self.models is not None:
            yield "teacher.model and teacher.models are not allowed together: one teacher, or one for each source"
        if self.models is not None and not self.models:
            yield "teacher.models is empty: {source: directory, …}"
        if self.external() and self.update != "static":
            field = "model" if self.model is not None else "models"
            yield (
                f"teacher.update={self.update} is not allowed with teacher.{field}: another model's weights are no "
                "average of the student's; choose teacher.update=static"
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


def shape_mistakes(config: TeacherConfig, model: str) -> Iterator[str]:
    """One line for each external teacher that cannot run in the place of the student; reads the config files alone."""
    own = Path(model) / "config.json"
    for source, directory in config.external().items():
        field = "teacher.model" if source is None else f"teacher.models.{source}"
        path = Path(directory) / "config.json"
        if not path.is_file():
            yield f"{field}={directory} has no config.json: it is a Hugging Face model directory"
            continue
        if not own.is_file():
            continue  # said of model.path
        theirs, ours = json.loads(path.read_text()), json.loads(own.read_text())
        differ = [
            f"{key} {theirs.get(key)} (model.path: {ours.get(key)})"
            for key in SHAPE
            if theirs.get(key) != ours.get(key)
        ]
        if differ:
            yield f"{field}={directory} has another shape than the student, which is not supported: {'; '.join(differ)}"


def check_external(config: TeacherConfig, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt]) -> None:
    """ValueError where a teacher has another tokenizer, or where a source of the data has no teacher."""
    from transformers import AutoTokenizer

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


class SwapTeacher:
    """Scores with the trainer's own model, holding the teacher's weights meanwhile.

    read_weights: a directory's weights as the snapshot store keeps them (`Policy.masters`). Collective.
    """

    def __init__(
        self,
        config: TeacherConfig,
        policy: Policy,
        snapshots: SnapshotStore,
        batcher: Batcher,
        read_weights: Callable[[str], Mapping[str, Tensor]],
    ):
        self.config, self.policy, self.snapshots = config, policy, snapshots
        self.batcher = batcher
        self.batches = 0  # that moved the student
        self.head: Tensor | None = None  # the teacher's output head [V / TP, H] as of the last score, on the last stage
        self.blank: dict[str, Tensor] = {}  # one row [1, …] of zeros for each field of `score`
        self.tags: dict[str | None, str] = {}  # source (None: any) → snapshot
        external = config.external()
        for source in external or [None]:
            self.tags[source] = TAG if source is None else f"{TAG}.{source}"
            if external:
                snapshots.put(self.tags[source], read_weights(external[source]))
            else:
                snapshots.save(TAG)

    @property
    def own_tag(self) -> str | None:
        """The snapshot that began as the student, None for external teachers."""
        return None if self.config.external() else TAG

    def score(self, update: Update) -> None:
        """Sets teacher_hidden, teacher_lse, … in `sample.tokens` of every sample that has a teacher prompt; `blank`
        stands for the others. Collective."""
        heads = []
        for source, tag in self.tags.items():
            # Without the other teachers' samples: as many micro-batches, on every rank, some of them fillers.
            mine = [s for s in update.samples if source is None or s.prompt.source == source]
            micros = self.batcher.pack(replace(update, samples=mine), use="teacher")
            heads.append(self._score_with(tag, micros, teacher_fields))
        if len(heads) > 1:
            self._side_by_side(update, heads)
        elif self.config.update == "trust_region":
            self._mix_with_student(update, heads[0])
        else:
            self.head = heads[0]

    def _score_with(self, tag: str, micros: list[MicroBatch], fn: Callable[..., dict[str, Tensor]]) -> Tensor | None:
        with self.snapshots.swap(tag):
            results = self.policy.score(micros, fn)
            head = self._head()
        self._keep(micros, results)
        return head

    def _keep(self, micros: list[MicroBatch], results: list[dict[str, Tensor]]) -> None:
        self.blank = {name: torch.zeros_like(rows[:1]) for name, rows in results[0].items()}
        write_back(micros, results)

    def _head(self) -> Tensor | None:
        head = self.policy.head_weight()
        return None if head is None else head.detach().clone()

    def _side_by_side(self, update: Update, heads: list[Tensor | None]) -> None:
        """Several teachers as one: each sample's hidden states stand in its teacher's columns of a head as wide as all
        heads together, zeros elsewhere, so that the logits are exactly that teacher's."""
        place = {source: number for number, source in enumerate(self.tags)}
        self.head = None if heads[0] is None else torch.cat(heads, dim=1)
        wide = [1, len(heads)]
        self.blank["teacher_hidden"] = self.blank["teacher_hidden"].repeat(wide)
        for sample in update.samples:
            if "teacher_hidden" in sample.tokens:
                hidden_RH = sample.tokens["teacher_hidden"]
                parts = [torch.zeros_like(hidden_RH) for _ in heads]
                parts[place[sample.prompt.source]] = hidden_RH
                sample.tokens["teacher_hidden"] = torch.cat(parts, dim=1)

    def _mix_with_student(self, update: Update, reference_head: Tensor | None) -> None:
        """(1 − r)·z_reference + r·z_student as one head: the two hidden states, scaled, on both heads side by side."""
        share = self.config.student_share
        student_head = self._head()
        self.head = None if student_head is None else torch.cat([reference_head, student_head], dim=1)

        def mixed(head: Head, micro: MicroBatch) -> dict[str, Tensor]:
            hidden_NH = torch.cat([(1 - share) * micro.fields["teacher_hidden"], share * head.hidden_NH], dim=1)
            both = Head(
                hidden_NH,
                self.head,
                temperature=head.temperature,
                vocab_size=head.vocab_size,
                tp_group=head.tp_group,
                chunk_tokens=head.chunk_tokens,
            )
            return teacher_fields(both, micro)

        micros = self.batcher.pack(update, use="teacher", defaults=self.blank)
        self._keep(micros, self.policy.score(micros, mixed))

    def after_optimizer_step(self) -> None:
        if self.config.update == "ema" and self.config.every == "step":
            self.snapshots.ema("student", TAG, self.config.alpha)

    def after_batch(self) -> None:
        self.batches += 1
        if self.config.update == "ema" and self.config.every == "batch":
            self.snapshots.ema("student", TAG, self.config.alpha)
        elif self.config.update == "periodic" and self.batches % self.config.interval == 0:
            self.snapshots.save(TAG)

    def state_dict(self) -> dict[str, int]:
        """Beside the snapshots, which the checkpoint holds in any case."""
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.batches = state["batches"]
