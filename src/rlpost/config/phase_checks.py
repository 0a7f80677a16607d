"""Rules of a step's phases: which there are, in which order, and what each has on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlpost.config.schema import Config

if TYPE_CHECKING:
    from rlpost.algorithms.base import Algorithm

# What each phase needs to have run before it in the same step.
AFTER = {
    "judge": "rollout",
    "prepare": None,
    "values": "prepare",
    "critic": "values",
    "teach": "prepare",
    "train": "prepare",
    "teacher_update": "train",
    "publish": "train",
}
# What each phase works on in any case.
USES = {
    "rollout": ("engine.weights", "engine.kv_cache"),
    "prepare": ("policy.weights",),
    "values": ("critic.weights",),
    "critic": ("critic.weights", "critic.gradients"),
    "teach": ("policy.weights",),
    "train": ("policy.weights", "policy.gradients"),
    "teacher_update": ("policy.weights", "policy.optimizer"),
    "publish": ("policy.weights", "engine.weights"),
}


def phase_mistakes(config: Config, algorithm: Algorithm) -> Iterator[str]:
    from rlpost.trainer import PHASES, RESIDENTS

    names = [phase.name for phase in config.phases]
    for resident in config.trainer.keep_on_device:
        if resident not in RESIDENTS:
            yield f"trainer.keep_on_device has no resident {resident!r}. There are: {', '.join(RESIDENTS)}"
    if not names:
        yield "phases is empty: choose phases=sdpo, phases=grpo, phases=ppo or phases=sft"
    for i, phase in enumerate(config.phases):
        if phase.name not in PHASES:
            yield f"phases has no phase {phase.name!r}. There are: {', '.join(PHASES)}"
        elif (needed := AFTER.get(phase.name)) and needed not in names[:i]:
            yield f"phase {phase.name!r} stands before {needed!r}, which it needs: change the order in phases"
        if phase.retries and phase.name not in ("rollout", "judge"):
            yield f"phase {phase.name!r} has retries={phase.retries}; only rollout and judge can be repeated"
        if phase.timeout_s is not None and phase.timeout_s < 0:
            yield f"phase {phase.name!r} has timeout_s={phase.timeout_s}; it is at least 0 (0: without a limit)"
        for resident in phase.residents:
            if resident not in RESIDENTS:
                yield f"phase {phase.name!r} has no resident {resident!r}. There are: {', '.join(RESIDENTS)}"
        lacking = [name for name in _uses(phase.name, config, algorithm) if name not in phase.residents]
        if lacking:
            yield f"phase {phase.name!r} lacks {', '.join(lacking)} among its residents: it works on them"
    doubled = sorted({n for n in names if names.count(n) > 1})
    if doubled:
        yield f"phases names {', '.join(doubled)} more than once"
    needs = {"rollout", "judge", "publish"} if "rollout" in algorithm.needs else {"read"}
    needs |= {"prepare", "train"} | ({"values", "critic"} if "values" in algorithm.needs else set())
    if "teacher" in algorithm.needs:
        needs.add("teach")
        if config.teacher and config.teacher.get("update", "ema") in ("ema", "periodic"):
            needs.add("teacher_update")
    missing = [name for name in PHASES if name in needs - set(names)]
    if names and missing:
        yield f"phases lacks {', '.join(missing)}, which algorithm.name={algorithm.name} needs: choose another phases=…"


def _uses(phase: str, config: Config, algorithm: Algorithm) -> tuple[str, ...]:
    """A swap of the reference's or the teacher's weights goes through the optimizer's masters."""
    teacher = config.teacher or {}
    swaps = {
        "prepare": "reference_logprobs" in algorithm.needs,
        "teach": teacher.get("backend", "swap") == "swap" and teacher.get("url") is None,
    }
    return USES.get(phase, ()) + (("policy.optimizer",) if swaps.get(phase) else ())
