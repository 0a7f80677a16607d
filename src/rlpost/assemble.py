"""Builds the rooms of a run from its configuration."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlpost.algorithms import build_algorithm
from rlpost.config.schema import Config, PhaseConfig
from rlpost.data.batching import Batcher, Update, write_back
from rlpost.data.dataset import PromptDataset
from rlpost.evaluate import EvalSet, target_logprobs
from rlpost.feedback import build_feedback
from rlpost.observe.guards import Guards
from rlpost.observe.observer import Observer
from rlpost.parallel import all_gather_objects
from rlpost.parallel import device as this_device
from rlpost.phases import Agreement, PhaseMachine
from rlpost.policy.critic import Critic
from rlpost.policy.hf_config import DTYPES
from rlpost.policy.megatron import MegatronPolicy
from rlpost.residents import EngineMemory, Resident, Together, Unmoved
from rlpost.rewards.judge import build_judge
from rlpost.rollout.canary import Canary
from rlpost.rollout.engine import TAGS, SamplingParams
from rlpost.rollout.engines import build_engine
from rlpost.rollout.filters import GroupFilter, build_filter
from rlpost.rollout.sampler import Sampler
from rlpost.teacher import build_teacher_config, check_external
from rlpost.teacher.build import build_teacher
from rlpost.teacher.engine import OwnEngineTeacher
from rlpost.types import Sample
from rlpost.weights.checkpoint import CheckpointStore
from rlpost.weights.publish import Publisher
from rlpost.weights.rank_state import seed_generators
from rlpost.weights.snapshots import SnapshotStore

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlpost.algorithms.base import Algorithm
    from rlpost.feedback.base import EnvironmentFeedback
    from rlpost.rewards.judge import Judge
    from rlpost.rollout.engine import Engine
    from rlpost.teacher import TeacherConfig
    from rlpost.teacher.protocol import Teacher

log = logging.getLogger(__name__)

REFERENCE = "reference"
EVAL_KEYS = ("path", "samples", "temperature", "top_p", "top_k", "max_response_tokens", "limit")


@dataclass
class Rooms:
    """Everything one rank of a run consists of. The trainer asks these by their protocols."""

    config: Config
    directory: Path
    agreement: Agreement
    machine: PhaseMachine
    observer: Observer
    tokenizer: PreTrainedTokenizerBase
    data: PromptDataset
    eval_sets: list[EvalSet]
    algorithm: Algorithm
    policy: MegatronPolicy
    critic: Critic | None
    snapshots: SnapshotStore
    batcher: Batcher
    engine: Engine
    publisher: Publisher
    sampler: Sampler
    group_filter: GroupFilter | None
    judge: Judge | None
    feedback: EnvironmentFeedback | None
    teacher: Teacher | None
    checkpoints: CheckpointStore
    guards: Guards
    canary: Canary

    def gather(self, samples: Sequence[Sample]) -> list[Sample]:
        """Every rank's samples on every rank, in the order of group and index."""
        everybody = [sample for part in all_gather_objects(list(samples)) for sample in part]
        return sorted(everybody, key=lambda s: (s.group_id, s.index))

    def score_logprobs(self, kind: str, updates: Sequence[Update]) -> None:
        """Sets old_logprobs (current weights) or reference_logprobs (initial weights) of this rank's samples."""
        for update in updates:
            micros = self.batcher.pack(update)
            if kind == "reference_logprobs":
                with self.snapshots.swap(REFERENCE):
                    results = self.policy.score(micros, target_logprobs)
            else:
                results = self.policy.score(micros, target_logprobs)
            write_back(micros, [{kind: result["logprobs"].cpu()} for result in results])

    def score_values(self, updates: Sequence[Update]) -> None:
        """Sets the critic's values of this rank's samples."""
        for update in updates:
            micros = self.batcher.pack(update)
            write_back(micros, [{"values": result["values"].cpu()} for result in self.critic.score(micros)])

    def move_reference(self, step: int) -> None:
        """The reference becomes the current policy where `algorithm.reference_every` says so."""
        every = self.algorithm.reference_every
        if every and step and step % every == 0:
            self.snapshots.save(REFERENCE)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over data-parallel ranks, in their order. Collective."""
        parts = all_gather_objects(tensor, self.policy.mesh.dp.group)
        return torch.stack(parts).sum(dim=0)

    def close(self) -> None:
        if self.engine.started:
            self.engine.close()
        if self.teacher is not None:
            self.teacher.close()
        self.observer.close()


def assemble(
    config: Config,
    directory: Path,
    agreement: Agreement,
    handlers: Mapping[str, Callable[[Any], None]],
    *,
    steps_done: int = 0,
    eval_data: Mapping[str, Sequence[Mapping[str, Any]]],
    objects: Mapping[str, Any],
) -> Rooms:
    """Build everything, the cheap and likely wrong (data, templates) before the dear (model, engine).

    objects: data, reward, algorithm, feedback and filter where the caller brings Python objects instead of names.
    """
    from transformers import AutoTokenizer

    observer = Observer(config, directory, rank=agreement.rank)
    observer.say(f"{directory}: reading data, then {config.model.path}")
    seed_generators(config.run.seed)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    seed = config.run.seed
    algorithm = build_algorithm(objects.get("algorithm", config.algorithm))
    responses = "rollout" not in algorithm.needs
    dataset = PromptDataset(config.data, tokenizer, objects.get("data"), seed, responses=responses)
    eval_sets = _eval_sets(config, tokenizer, eval_data, responses)
    feedback = None
    if (chosen := objects.get("feedback", config.feedback)) is not None:
        feedback = build_feedback(chosen)
        feedback.bind(tokenizer, seed=seed, chat_template_kwargs=config.data.chat_template_kwargs)
    reward = objects.get("reward", config.reward)
    judge = build_judge(reward, feedback=feedback) if reward is not None else None
    group_filter = objects.get("filter", config.rollout.filter)
    teacher_config = None if config.teacher is None else build_teacher_config(config.teacher)
    if teacher_config is not None:
        check_external(teacher_config, tokenizer, dataset.prompts)

    policy = MegatronPolicy(
        config.model,
        config.optim,
        config.parallel,
        temperature=config.rollout.temperature if "rollout" in algorithm.needs else 1.0,
        total_steps=(config.trainer.steps - config.critic.alone_steps) * config.train.updates_per_rollout,
        seed=seed,
        recompute=config.train.recompute,
        overlap=config.train.overlap,
    )
    critic = None
    if "values" in algorithm.needs:
        critic = Critic(
            config.critic,
            config.model,
            config.parallel,
            total_steps=config.trainer.steps * config.train.updates_per_rollout,
            seed=seed,
            recompute=config.train.recompute,
            overlap=config.train.overlap,
        )
    new_engine = partial(
        build_engine, config.engine, config.model.path, dtype=DTYPES[config.engine_dtype], seed=seed + agreement.rank
    )
    engine = new_engine()
    publisher = Publisher(
        policy,
        engine,
        bucket_bytes=config.publish.bucket_bytes,
        verify=config.publish.verify,
        retries=config.publish.retries,
    )
    snapshots = SnapshotStore(policy.masters, policy.sync_from_masters)
    if "reference_logprobs" in algorithm.needs:
        snapshots.save(REFERENCE)
    batcher = Batcher(
        algorithm,
        updates_per_rollout=config.train.updates_per_rollout,
        max_tokens=config.train.max_tokens_per_micro_batch * policy.mesh.cp.size,
        max_response_tokens=config.rollout.max_response_tokens,
        dp_rank=policy.mesh.dp.rank,
        dp_size=policy.mesh.dp.size,
    )
    teacher = None
    if teacher_config is not None:
        teacher = build_teacher(teacher_config, config, policy, snapshots, batcher, publisher, engine, new_engine)
    observer.begin(steps_done)
    return Rooms(
        config=config,
        directory=directory,
        agreement=agreement,
        machine=PhaseMachine(
            phases_of(config),
            handlers,
            _residents(policy, critic, teacher, engine),
            agreement,
            observer.phase_begins,
            observer.phase_done,
        ),
        observer=observer,
        tokenizer=tokenizer,
        data=dataset,
        eval_sets=eval_sets,
        algorithm=algorithm,
        policy=policy,
        critic=critic,
        snapshots=snapshots,
        batcher=batcher,
        engine=engine,
        publisher=publisher,
        sampler=Sampler(
            engine,
            tokenizer,
            config.rollout,
            seed=seed,
            rank=agreement.rank,
            ranks=policy.mesh.world_size,
            engine_ranks=config.engine.tensor_parallel,
        ),
        group_filter=None if group_filter is None else build_filter(group_filter),
        judge=judge,
        feedback=feedback,
        teacher=teacher,
        checkpoints=CheckpointStore(directory / "checkpoints", config.trainer.keep),
        guards=Guards(config.guards),
        canary=Canary(policy, engine, dataset.prompts[0].ids, config.rollout.canary, _coarser_dtype(config)),
    )


def teacher_distance(rooms: Rooms) -> dict[str, float]:
    """ema/distance: ‖student − teacher‖ / ‖student‖ over all ranks' shards; none to another model."""
    if rooms.teacher.own_tag is None:
        return {}
    parts = all_gather_objects(
        rooms.snapshots.distance_parts(rooms.teacher.own_tag, only=rooms.policy.distinct_masters())
    )
    difference, student = (sum(part[i] for part in parts) for i in range(2))
    return {"ema/distance": (difference / student) ** 0.5}


def _coarser_dtype(config: Config) -> torch.dtype:
    return max(DTYPES[config.engine_dtype], DTYPES[config.model.dtype], key=lambda dtype: torch.finfo(dtype).eps)


def phases_of(config: Config) -> list[PhaseConfig]:
    """The configured phases with what the run keeps on the device through all of them, and without optimizer states
    that are there for the update alone."""
    only_to_step = {"train": config.optim.offload, "critic": config.critic.offload}
    phases = []
    for phase in config.phases:
        residents = [
            name for name in phase.residents if not (only_to_step.get(phase.name) and name.endswith(".optimizer"))
        ]
        if phase.name == "teach" and config.teacher is not None:
            residents = _to_teach(build_teacher_config(config.teacher), residents)
        kept = [name for name in config.trainer.keep_on_device if name not in residents]
        phases.append(replace(phase, residents=residents + kept))
    return phases


def _to_teach(teacher: TeacherConfig, residents: list[str]) -> list[str]:
    """A teacher on an engine needs that, and no swap."""
    if teacher.backend != "engine":
        return residents
    engine = ["teacher.engine"] if teacher.own_engine else ["engine.weights", "engine.kv_cache"]
    return [name for name in residents if name != "policy.optimizer"] + engine


def _residents(
    policy: MegatronPolicy, critic: Critic | None, teacher: Teacher | None, engine: Engine
) -> dict[str, Resident]:
    def engine_bytes() -> int:
        return sum(math.prod(s.shape) * s.dtype.itemsize for s in engine.expected_tensors().values())

    on_gpu = this_device().type == "cuda"
    found: dict[str, Resident] = {"teacher.engine": Unmoved(lambda: 0)}
    for who, model in (("policy", policy), ("critic", critic.model if critic is not None else None)):
        if model is not None:
            sizes = model.resident_bytes()
            for name, moved in model.residents.items():
                found[f"{who}.{name}"] = moved if on_gpu else Unmoved(lambda size=sizes[name]: size)
    own = Together(teacher.residents() if teacher is not None else [])
    found["teacher.weights"] = own if on_gpu else Unmoved(own.bytes)
    if on_gpu:
        found["engine.weights"] = EngineMemory(engine, ["weights"], engine_bytes)
        found["engine.kv_cache"] = EngineMemory(engine, ["kv_cache", "cuda_graph"], lambda: 0)
        if isinstance(teacher, OwnEngineTeacher):
            found["teacher.engine"] = EngineMemory(teacher.engine, TAGS, engine_bytes)
    else:  # one memory: nothing moves
        found |= {"engine.weights": Unmoved(engine_bytes), "engine.kv_cache": Unmoved(lambda: 0)}
    return found


def _eval_sets(
    config: Config, tokenizer: PreTrainedTokenizerBase, rows: Mapping[str, Any], responses: bool
) -> list[EvalSet]:
    sets = []
    for name, given in {**config.data.eval, **rows}.items():
        spec = dict(given) if isinstance(given, Mapping) else {}
        rows = spec["path"] if isinstance(given, Mapping) else given
        prompts = PromptDataset(config.data, tokenizer, rows, without_response=responses).prompts
        rollout = config.rollout
        params = SamplingParams(
            max_tokens=spec.get("max_response_tokens", rollout.max_response_tokens),
            temperature=spec.get("temperature", rollout.temperature),
            top_p=spec.get("top_p", rollout.top_p),
            top_k=spec.get("top_k", rollout.top_k),
            stop_token_ids=tuple(rollout.stop_token_ids),
        )
        sets.append(EvalSet(name, prompts[: spec.get("limit")], params, spec.get("samples", 1)))
    return sets
