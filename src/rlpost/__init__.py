"""rlpost: RL post-training of language models as one SPMD program."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rlpost.rewards import RewardResult
    from rlpost.trainer import Trainer

__all__ = ["RewardResult", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    # `import rlpost` stays fast: torch, Megatron and Transformers load with the first use of a class.
    if name == "Trainer":
        from rlpost.trainer import Trainer

        return Trainer
    if name == "RewardResult":
        from rlpost.rewards import RewardResult

        return RewardResult
    raise AttributeError(f"module 'rlpost' has no attribute {name!r}")
