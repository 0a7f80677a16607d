"""Linear layers whose weights lie in oneDNN's blocked layout.

A decode step multiplies a few rows by every weight of the model. On a CPU `F.linear` repacks a plain weight in every
call and reaches a fraction of the memory's bandwidth; a weight that was reordered once is about twice as fast at 16
rows, in fp32 and in bf16, and no slower at a thousand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """Takes a Linear's parameters over, under the same names. While packed, a weight that no other module reads
    exists only in the packed layout, so packing costs no memory."""

    def __init__(self, linear: nn.Linear, *, shared: bool):
        super().__init__()
        self.weight, self.bias, self.shared = linear.weight, linear.bias, shared
        self.packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def pack(self) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        if not self.shared:
            release(self.weight)

    def unpack(self) -> None:
        """Drop the packed weight. What the plain one holds is undefined until it is written."""
        self.packed = None
        restore(self.weight)

    def plain_weight(self) -> Tensor:
        """The weight that serves, in its usual layout."""
        return self.weight.detach() if self.packed is None else self.packed.to_dense()


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module) -> list[PackedLinear]:
    """Replace every Linear of a CPU model; nothing is packed yet."""
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    readers: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            readers[id(parameter)] = readers.get(id(parameter), 0) + 1
    for name, linear in linears.items():
        model.set_submodule(name, PackedLinear(linear, shared=readers[id(linear.weight)] > 1))
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def release(tensor: Tensor) -> None:
    """Free the tensor's memory; its shape stays."""
    tensor.untyped_storage().resize_(0)


def restore(tensor: Tensor) -> None:
    """Allocate the tensor's memory again, with undefined content, where it was released."""
    size = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() != size:
        tensor.untyped_storage().resize_(size)
