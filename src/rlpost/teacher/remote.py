"""A teacher behind a URL: log-probs of the sampled tokens, and nothing else of its distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlpost.losses.distill import LOGP_FLOOR
from rlpost.parallel import all_gather_objects
from rlpost.teacher.client import ScoringClient, TeacherServerError
from rlpost.teacher.config import TeacherConfig
from rlpost.teacher.payloads import Payload, count_payloads, use_payloads

if TYPE_CHECKING:
    from torch import Tensor

    from rlpost.data.batching import Update
    from rlpost.parallel import Mesh
    from rlpost.residents import Moved
    from rlpost.types import Sample


class RemoteTeacher:
    """One rank of each data-parallel part asks for its samples; the part's other ranks get what it heard."""

    head: Tensor | None = None
    own_tag: str | None = None

    def __init__(self, config: TeacherConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.client = ScoringClient(config)
        self.blank = {"teacher_logprobs": torch.zeros(1)}

    def score(self, update: Update) -> dict[str, float]:
        """Sets teacher_logprobs [R]. A sequence whose answer cannot be used gets distill_mask 0 and is counted.

        Raises, on all ranks alike, TeacherServerError where a server does not answer, and PayloadError where more than
        `max_bad_payload_fraction` of all ranks' sequences are bad. Collective.
        """
        taught = [sample for sample in update.samples if sample.distill_mask > 0]
        asks = self.mesh.tp.rank == self.mesh.pp.rank == self.mesh.cp.rank == 0
        parts = all_gather_objects((self.mesh.dp.rank, *self._ask(taught)) if asks else None)
        heard = {rank: (rows, error) for rank, rows, error in filter(None, parts)}
        for _, error in heard.values():
            if error is not None:
                raise TeacherServerError(error)
        use_payloads(taught, [_payload(row) for row in heard[self.mesh.dp.rank][0]], self.blank)
        everything = [row for rows, _ in heard.values() for row in rows]
        return count_payloads(everything, self.config.max_bad_payload_fraction, f"teacher.url={self.config.url}")

    def residents(self) -> list[Moved]:
        return []

    def _ask(self, samples: Sequence[Sample]) -> tuple[list[list[float] | str], str | None]:
        """(log-probs of each response, or what is wrong with them; why there are none)."""
        sequences = [sample.teacher_prompt_ids + sample.response_ids for sample in samples]
        try:
            return self.client.score(sequences, [len(sample.teacher_prompt_ids) for sample in samples]), None
        except TeacherServerError as error:
            return [], str(error)

    def start(self) -> None:
        """A server runs already."""

    def serve(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """A server is nobody's of this job."""

    def after_optimizer_step(self) -> None:
        """A server's weights do not move."""

    def after_batch(self) -> None:
        """A server's weights do not move."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is kept."""


def _payload(row: list[float] | str) -> Payload:
    if isinstance(row, str):
        return row
    return {"teacher_logprobs": torch.tensor(row, dtype=torch.float32).clamp_min(LOGP_FLOOR)}
