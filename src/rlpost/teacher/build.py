"""From the configuration to a teacher."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from rlpost.policy.frozen import FrozenModel
from rlpost.policy.hf_io import SafetensorsReader
from rlpost.teacher.config import TeacherConfig, shape_differences
from rlpost.teacher.local import LocalTeacher
from rlpost.teacher.remote import RemoteTeacher

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.config.schema import Config
    from rlpost.data.batching import Batcher
    from rlpost.policy.megatron import MegatronPolicy
    from rlpost.teacher.protocol import Teacher
    from rlpost.weights.snapshots import SnapshotStore

log = logging.getLogger(__name__)


def build_teacher(
    teacher: TeacherConfig, config: Config, policy: MegatronPolicy, snapshots: SnapshotStore, batcher: Batcher
) -> Teacher:
    """Collective. Raises ValueError for a checkpoint that the layout of `config.parallel` cannot cut."""
    if teacher.url is not None:
        return RemoteTeacher(teacher, policy.mesh)

    def read_weights(path: str) -> dict[str, Tensor]:
        return policy.scatter_masters(SafetensorsReader(path).get)

    models = {}
    for source, directory in teacher.external().items():
        if differences := shape_differences(directory, config.model.path):
            try:
                models[source] = FrozenModel(
                    replace(config.model, path=directory), config.parallel, temperature=policy.temperature
                )
            except ValueError as error:
                raise ValueError(f"the teacher {directory}: {error}") from error
            size = models[source].weight_bytes() / 1e6
            log.info("teacher %s is a model of its own, %.0f MB: %s", directory, size, "; ".join(differences))
    return LocalTeacher(teacher, policy, snapshots, batcher, read_weights, models)
