"""A teacher on an engine: the student's own in turns with it, or a second one on every rank.

The weights are the snapshots of a `LocalTeacher`. Engines tell the log-probs of the sampled tokens and of the
teacher's own likeliest ids, no whole distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlpost.data.packing import assign
from rlpost.losses.distill import LOGP_FLOOR
from rlpost.parallel import all_gather_objects
from rlpost.teacher.config import TeacherConfig
from rlpost.teacher.payloads import Payload, count_payloads, use_payloads
from rlpost.teacher.weights import SnapshotTeacher, SnapshotWeights

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.data.batching import Update
    from rlpost.policy.megatron import MegatronPolicy
    from rlpost.residents import Moved
    from rlpost.rollout.engine import Engine, PromptScore
    from rlpost.types import Sample
    from rlpost.weights.publish import Publisher
    from rlpost.weights.snapshots import SnapshotStore


class EngineTeacher(SnapshotTeacher):
    """`teacher.engine=shared`: the student's engine serves the teacher while it scores.

    weights: what `publisher` sends to `engine`. top_k: of the teacher's ids, 0 for the sampled tokens alone.
    engine_ranks: neighbouring ranks that share one engine and call it together. Collective.
    """

    head: Tensor | None = None

    def __init__(
        self,
        config: TeacherConfig,
        policy: MegatronPolicy,
        snapshots: SnapshotStore,
        read_weights: Callable[[str], Mapping[str, Tensor]],
        weights: SnapshotWeights,
        publisher: Publisher,
        engine: Engine,
        *,
        top_k: int,
        engine_ranks: int = 1,
    ):
        super().__init__(config, snapshots, read_weights)
        self.weights, self.publisher, self.engine = weights, publisher, engine
        self.mesh, self.temperature, self.top_k = policy.mesh, policy.temperature, top_k
        self.vocabulary = policy.hf_config.vocab_size
        self.blank = _blank(top_k, self.vocabulary)
        self._published = -1  # the `moves` of what was last published
        self._engine_group = None
        if engine_ranks > 1:
            self._engine_group, _ = dist.new_subgroups(group_size=engine_ranks, backend="gloo")

    def serve(self) -> dict[str, float]:
        """Publishes the teacher where the engine holds other weights, older ones, or none since it slept."""
        if self.publisher.served is self.weights and self._published == self.moves and self.engine.serving:
            return {}
        found = self.publisher.publish(self.weights)
        self._published = self.moves
        return {"teacher/version": found["publish/version"], "teacher/publish_seconds": found["publish/seconds"]}

    def score(self, update: Update) -> dict[str, float]:
        """Sets teacher_logprobs [R] and, with top_k, teacher_topk_ids and teacher_topk_logprobs [R, K]. A sequence
        whose scores cannot be used gets distill_mask 0 and is counted.

        Raises PayloadError, on all ranks alike, where more than `max_bad_payload_fraction` of all ranks' sequences are
        bad. Collective.
        """
        taught = [sample for sample in update.samples if sample.distill_mask > 0 and sample.response_ids]
        payloads = self._payloads(taught)
        use_payloads(taught, payloads, self.blank)
        faults = [payload if isinstance(payload, str) else None for payload in payloads]
        everybody = [one for part in all_gather_objects(faults if self._number() == 0 else []) for one in part]
        who = f"the teacher's engine (teacher.engine={self.config.engine})"
        return count_payloads(everybody, self.config.max_bad_payload_fraction, who)

    def residents(self) -> list[Moved]:
        return []  # the engine is none of the trainer's models

    def _number(self) -> int:
        """Of this rank among those of its data-parallel part."""
        mesh = self.mesh
        return (mesh.pp.rank * mesh.cp.size + mesh.cp.rank) * mesh.tp.size + mesh.tp.rank

    def _payloads(self, taught: Sequence[Sample]) -> list[Payload]:
        """Of all samples of this data-parallel part, whose ranks each score a share."""
        axes = (self.mesh.tp, self.mesh.cp, self.mesh.pp)
        lengths = [len(sample.teacher_prompt_ids) + len(sample.response_ids) for sample in taught]
        share = assign(lengths, math.prod(axis.size for axis in axes))[self._number()]
        scores = self._ask([taught[i] for i in share])
        found = {i: self._payload(taught[i], score) for i, score in zip(share, scores, strict=True)}
        for axis in axes:
            found = {i: payload for part in all_gather_objects(found, axis.group) for i, payload in part.items()}
        return [found[i] for i in range(len(taught))]

    def _ask(self, samples: Sequence[Sample]) -> list[PromptScore]:
        """These samples' scores; the ranks of one engine ask together, for what each of them wants."""
        sequences = [sample.teacher_prompt_ids + sample.response_ids for sample in samples]
        starts = [len(sample.teacher_prompt_ids) for sample in samples]
        asked, first = [(sequences, starts)], 0
        if self._engine_group is not None:
            asked = all_gather_objects(asked[0], self._engine_group)
            first = sum(len(theirs) for theirs, _ in asked[: self._engine_group.rank()])
        everything = [ids for theirs, _ in asked for ids in theirs]
        if not everything:
            return []
        scores = self.engine.score(
            everything,
            [start for _, theirs in asked for start in theirs],
            top_k=self.top_k,
            temperature=self.temperature,
        )
        return scores[first : first + len(samples)]

    def _payload(self, sample: Sample, score: PromptScore) -> Payload:
        """The fields of the sample's tokens, or what is wrong with the score."""
        count, version = len(sample.response_ids), self.publisher.version
        if score.version != version:
            return f"version {score.version} scored, not the teacher's {version}"
        if score.logprobs.shape != (count,):
            return f"{len(score.logprobs)} scores for {count} response tokens"
        fields = {"teacher_logprobs": score.logprobs}
        if self.top_k:
            ids, fields["teacher_topk_logprobs"] = score.topk_ids, score.topk_logprobs
            if not ids.shape == score.topk_logprobs.shape == (count, self.top_k):
                return f"lists of {list(ids.shape)} ids for {count} response tokens and {self.top_k} ids each"
            if not bool(((ids >= 0) & (ids < self.vocabulary)).all()):
                return f"ids {int(ids.min())} … {int(ids.max())}, in a vocabulary of {self.vocabulary}"
        for name, values in fields.items():
            if not bool((values < math.inf).all()):  # NaN is not either; −inf is a token that it rules out
                return f"{name} is {values[~(values < math.inf)][0]} somewhere"
        fields = {name: values.float().clamp_min(LOGP_FLOOR) for name, values in fields.items()}
        return fields | ({"teacher_topk_ids": ids} if self.top_k else {})


class OwnEngineTeacher(EngineTeacher):
    """`teacher.engine=own`: the teacher stays on `engine`, a second one, under versions of its own. Where memory moves
    the engine sleeps but for the scoring, and its weights come anew each time, as they do where the teacher moves."""

    def start(self) -> None:
        if not self.engine.started:
            self.engine.start()

    def serve(self) -> dict[str, float]:
        self.start()
        return super().serve()

    def close(self) -> None:
        if self.engine.started:
            self.engine.close()

    def state_dict(self) -> dict[str, Any]:
        """version: that which today's weights have, or will have when they are published."""
        return super().state_dict() | {"version": self.publisher.version + (self._published != self.moves)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Versions begin where the checkpoint's were; those of an engine that serves already only advance."""
        super().load_state_dict(state)
        if not self.engine.started:
            self.publisher.resume(state.get("version", 0))


def _blank(top_k: int, vocabulary: int) -> dict[str, Tensor]:
    """For samples that nobody scored: a proper distribution, as the gradient of none is 0 · NaN."""
    blank = {"teacher_logprobs": torch.zeros(1)}
    if top_k:
        blank["teacher_topk_ids"] = torch.arange(top_k)[None]
        blank["teacher_topk_logprobs"] = torch.full((1, top_k), -math.log(vocabulary))
    return blank
