"""How pipeline stages with several chunks tell each other the shapes of what they send."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _p2p_ops
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from rlpost.parallel import device


class OrderedP2P(P2PCommunicator):
    """Megatron's communicator, with shapes sent in the same order as the tensors that they announce.

    Megatron batches the shapes even where it does not batch the tensors. Of two stages each is the other's neighbour on
    both sides, so that with virtual stages two messages of a batch go to one peer, and nothing tells them apart.
    """

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        def shape_of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else torch.tensor(tensor.shape, dtype=torch.int64, device=device())

        from_prev, from_next = (torch.zeros(3, dtype=torch.int64, device=device()) for _ in range(2))
        requests = _p2p_ops(
            tensor_send_prev=shape_of(tensor_send_prev),
            tensor_recv_prev=from_prev if recv_prev else None,
            tensor_send_next=shape_of(tensor_send_next),
            tensor_recv_next=from_next if recv_next else None,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        for request in requests.values():
            request.wait()
        return from_prev.tolist(), from_next.tolist()


def schedule_options(config: Any) -> dict[str, Any]:
    """Arguments of Megatron's schedule that differ with virtual stages."""
    if config.virtual_pipeline_model_parallel_size is None:
        return {}
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return {"p2p_communicator": OrderedP2P(groups.pp, config), "pg_collection": groups}
