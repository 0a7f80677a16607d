"""Algorithms by name, each in a small file of its own.

`build_algorithm({"name": "grpo", "clip_high": 0.28})`, or `_target_` with the import path of your own class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from rlpost.imports import did_you_mean, import_object, resolve

if TYPE_CHECKING:
    from rlpost.algorithms.base import Algorithm

PATHS = {
    "grpo": "rlpost.algorithms.grpo.GRPO",
    "dr_grpo": "rlpost.algorithms.variants.DrGRPO",
    "dapo": "rlpost.algorithms.variants.DAPO",
    "gspo": "rlpost.algorithms.variants.GSPO",
    "cispo": "rlpost.algorithms.variants.CISPO",
    "sapo": "rlpost.algorithms.variants.SAPO",
    "rloo": "rlpost.algorithms.variants.RLOO",
    "reinforce": "rlpost.algorithms.variants.Reinforce",
    "reinforce_pp": "rlpost.algorithms.reinforce_pp.ReinforcePP",
    "ppo": "rlpost.algorithms.ppo.PPO",
    "sdpo": "rlpost.algorithms.sdpo.SDPO",
    "opd": "rlpost.algorithms.opd.OPD",
    "blend": "rlpost.algorithms.blend.Blend",
    "sft": "rlpost.algorithms.sft.SFT",
}


class _Algorithms(Mapping[str, "type[Algorithm]"]):
    """name → class, imported at its first use."""

    def __getitem__(self, name: str) -> type[Algorithm]:
        return import_object(PATHS[name])

    def __iter__(self) -> Iterator[str]:
        return iter(PATHS)

    def __len__(self) -> int:
        return len(PATHS)


ALGORITHMS = _Algorithms()


def build_algorithm(cfg: Mapping[str, Any] | Algorithm) -> Algorithm:
    """The algorithm that `cfg` names, its other keys being the fields of its dataclass; or itself where it is one.

    Raises ValueError with one line for each unknown field and each value that is not allowed.
    """
    if not isinstance(cfg, Mapping):
        return cfg
    cls, values = resolve(cfg, ALGORITHMS, "algorithm")
    if not is_dataclass(cls):
        raise ValueError(f"algorithm._target_={cfg['_target_']} is not a dataclass, as an Algorithm is")
    known = [f.name for f in fields(cls) if f.init]
    problems = [
        f"algorithm has no field {key!r} (algorithm.name={cls.name}).{did_you_mean(key, known)} "
        f"There are: {', '.join(known)}"
        for key in values
        if key not in known
    ]
    algorithm = None
    try:
        algorithm = cls(**{key: value for key, value in values.items() if key in known})
    except ValueError as error:
        problems += str(error).splitlines()
    if problems:
        raise ValueError("\n".join(problems))
    return algorithm
