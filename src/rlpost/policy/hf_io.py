"""Reading Hugging Face safetensors, memory-mapped: a slice of a tensor reads only its own pages."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor


class SafetensorsReader:
    """The tensors of a Hugging Face directory by name, of one file or of an indexed set.

    Raises FileNotFoundError where the directory holds no safetensors or its index names a missing file.
    """

    def __init__(self, directory: str | Path) -> None:
        root = Path(directory)
        index, single = root / "model.safetensors.index.json", root / "model.safetensors"
        if index.is_file():
            files = set(json.loads(index.read_text())["weight_map"].values())
        elif single.is_file():
            files = {single.name}
        else:
            raise FileNotFoundError(f"{root} holds neither {single.name} nor {index.name}")
        missing = sorted(name for name in files if not (root / name).is_file())
        if missing:
            raise FileNotFoundError(f"{index} names files that are not there: {', '.join(missing)}")
        self.root = root
        self._file_of = {}
        for name in sorted(files):
            # The mapping of a file stays open as long as the reader lives; no page is read before it is used.
            handle = safe_open(root / name, framework="pt", device="cpu")
            self._file_of.update(dict.fromkeys(handle.keys(), handle))

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def get(self, name: str) -> Tensor:
        """The tensor, a view of the mapped file: do not write to it. Raises KeyError for an unknown name."""
        if name not in self._file_of:
            raise KeyError(f"{self.root} has no tensor {name}")
        return self._file_of[name].get_tensor(name)
