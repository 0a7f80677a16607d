"""torchvision's C library is built for CUDA and does not load here; its Python part only needs two operators declared.

Loaded by a .pth file in every process, so it imports torch only once torchvision is asked for.
"""

import sys


class _DeclareBeforeTorchvision:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(_DeclareBeforeTorchvision)
            import torch

            torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _DeclareBeforeTorchvision)
