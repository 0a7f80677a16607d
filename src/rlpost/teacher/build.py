"""From the configuration to a teacher."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rlpost.observe.progress import human_bytes
from rlpost.policy.frozen import FrozenModel
from rlpost.policy.hf_io import SafetensorsReader
from rlpost.teacher.config import TeacherConfig, shape_differences
from rlpost.teacher.engine import EngineTeacher, OwnEngineTeacher
from rlpost.teacher.local import LocalTeacher
from rlpost.teacher.remote import RemoteTeacher
from rlpost.teacher.weights import SnapshotWeights
from rlpost.weights.publish import Publisher

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.config.schema import Config
    from rlpost.data.batching import Batcher
    from rlpost.policy.megatron import MegatronPolicy
    from rlpost.rollout.engine import Engine
    from rlpost.teacher.protocol import Teacher
    from rlpost.weights.snapshots import SnapshotStore

log = logging.getLogger(__name__)


def build_teacher(
    teacher: TeacherConfig,
    config: Config,
    policy: MegatronPolicy,
    snapshots: SnapshotStore,
    batcher: Batcher,
    publisher: Publisher,
    engine: Engine,
    new_engine: Callable[[], Engine],
) -> Teacher:
    """publisher, engine: the student's. new_engine: another one like it, not started. Collective.

    Raises ValueError for a checkpoint that the layout of `config.parallel` cannot cut.
    """
    if teacher.url is not None:
        return RemoteTeacher(teacher, policy.mesh)

    def read_weights(path: str) -> dict[str, Tensor]:
        return policy.scatter_masters(SafetensorsReader(path).get)

    if teacher.backend == "engine":
        weights = SnapshotWeights(policy.gather_masters, snapshots)
        kind = EngineTeacher
        if teacher.own_engine:
            kind, engine = OwnEngineTeacher, new_engine()
            settings = {name: getattr(publisher, name) for name in ("bucket_bytes", "verify", "retries")}
            publisher = Publisher(weights, engine, **settings)
        return kind(
            teacher,
            policy,
            snapshots,
            read_weights,
            weights,
            publisher,
            engine,
            top_k=batcher.algorithm.teacher_top_k,
            engine_ranks=config.engine.tensor_parallel,
        )
    models = {}
    for source, directory in teacher.external().items():
        if differences := shape_differences(directory, config.model.path):
            try:
                models[source] = FrozenModel(
                    replace(config.model, path=directory), config.parallel, temperature=policy.temperature
                )
            except ValueError as error:
                raise ValueError(f"the teacher {directory}: {error}") from error
            size = human_bytes(models[source].weight_bytes())
            log.info("teacher %s is a model of its own, %s: %s", directory, size, "; ".join(differences))
    return LocalTeacher(teacher, policy, snapshots, batcher, read_weights, models)
