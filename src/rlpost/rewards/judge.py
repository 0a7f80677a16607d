"""Scores a rollout: one reward or several, with weights, time limits, and failures that are counted."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import numbers
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlpost.imports import check_keywords, resolve
from rlpost.rewards import RewardResult
from rlpost.rewards.choice import Choice
from rlpost.rewards.exact import Exact
from rlpost.rewards.processes import ProcessPool
from rlpost.rewards.shaping import Length, Overlong
from rlpost.rewards.workers import run_all
from rlpost.types import Sample

if TYPE_CHECKING:
    from rlpost.feedback.base import EnvironmentFeedback

log = logging.getLogger(__name__)

BUILTIN: dict[str, Callable[..., Any]] = {"choice": Choice, "exact": Exact, "length": Length, "overlong": Overlong}
GROUP_PARAMETERS = ("group", "samples")  # a function whose first parameter is so called scores whole groups


JUDGE_OPTIONS = ("timeout", "on_error", "workers", "isolate")


class RewardError(RuntimeError):
    """A reward raised, took too long or returned no number, with on_error=raise."""


@dataclass(frozen=True)
class Reward:
    name: str  # of its column in `reward_details`
    fn: Callable[..., Any]
    weight: float = 1.0
    group: bool = False  # fn(samples of one group) -> list, instead of fn(sample)


def build_reward(spec: Any) -> list[Reward]:
    """From what a configuration or a notebook gives: a function, `{name: choice, …}`, `{_target_: import.path, …}`, or
    a list of these and of `{fn: any of these, weight: 0.5, name: log name}`.

    A `weight`, and `group: true|false` where the parameter's name does not tell, may stand in each; other keys are
    arguments of the class or function. A list with options of the judge is `{rewards: […], timeout: …}`.
    Raises ValueError, TypeError or ImportError saying what is wrong.
    """
    if isinstance(spec, Mapping):
        spec = {key: value for key, value in spec.items() if key not in JUDGE_OPTIONS}
        spec = spec["rewards"] if set(spec) == {"rewards"} else [spec]
    elif isinstance(spec, str) or not isinstance(spec, Sequence):
        spec = [spec]
    if not spec:
        raise ValueError("reward is an empty list: name one (choice, exact) or give a function")
    rewards = [item if isinstance(item, Reward) else _one(item) for item in spec]
    twice = [name for name, count in Counter(reward.name for reward in rewards).items() if count > 1]
    if twice:
        raise ValueError(f"reward: two are called {twice[0]!r}; give each a name of its own: {{fn: …, name: …}}")
    return rewards


def _one(spec: Any) -> Reward:
    if isinstance(spec, str):
        spec = {"name": spec} if spec in BUILTIN else {"_target_": spec}
    if not isinstance(spec, Mapping):
        if not callable(spec):
            raise TypeError(f"reward: {spec!r} is neither a function nor a name")
        return Reward(_name(spec), spec, group=_takes_group(spec))
    given = dict(spec)
    weight, group = given.pop("weight", 1.0), given.pop("group", None)
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not math.isfinite(weight):
        raise ValueError(f"reward.weight={weight} is not a finite number")
    if "fn" in given:
        label, inner = given.pop("name", None), given.pop("fn")
        if given and callable(inner):
            inner = _with_arguments(inner, given)
        elif given:
            key = "_target_" if inner not in BUILTIN else "name"
            inner = {key: inner, **given}
        built = _one(inner)
        name, fn, found = label or built.name, built.fn, built.group
    else:
        target, kwargs = resolve(given, BUILTIN, "reward")
        fn = _with_arguments(target, kwargs)
        name, found = given.get("name") or _name(target), _takes_group(fn)
    return Reward(name, fn, float(weight), found if group is None else bool(group))


def _with_arguments(target: Callable[..., Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    check_keywords(target, kwargs, "reward", own=0 if inspect.isclass(target) else 1)
    if inspect.isclass(target):
        return target(**kwargs)
    return functools.partial(target, **kwargs) if kwargs else target


def _name(target: Any) -> str:
    return getattr(target, "__name__", type(target).__name__).strip("<>")


def _takes_group(fn: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(fn).parameters)
    except ValueError:  # a builtin without a signature
        return False
    return bool(parameters) and parameters[0] in GROUP_PARAMETERS


def build_judge(spec: Any, *, feedback: EnvironmentFeedback | None = None) -> Judge:
    """The judge of a configuration: rewards, and `timeout`, `on_error`, `workers`, `isolate` beside them."""
    options = {key: spec[key] for key in JUDGE_OPTIONS if key in spec} if isinstance(spec, Mapping) else {}
    return Judge(spec, feedback=feedback, **options)


class Judge:
    """Gives every sample its reward, feedback and format_ok.

    reward: what `build_reward` takes or returned. timeout: seconds for each call. on_error: the reward where one
    raises, takes too long or returns no finite number (counted), or "raise". workers: calls at once. isolate: in
    processes instead of threads, for a reward that may crash or never give the interpreter back; it must be importable.
    feedback: a strategy whose `record` hears of each sample's result.
    """

    def __init__(
        self,
        reward: Any,
        *,
        timeout: float = 60.0,
        on_error: float | str = 0.0,
        workers: int = 8,
        isolate: bool = False,
        feedback: EnvironmentFeedback | None = None,
    ):
        if on_error != "raise" and (isinstance(on_error, str) or not math.isfinite(on_error)):
            raise ValueError(f"reward.on_error={on_error} is not allowed; it is a number or raise")
        if timeout <= 0 or workers < 1:
            raise ValueError(f"reward.timeout={timeout} and reward.workers={workers}: above 0, and at least 1")
        self.rewards = build_reward(reward)
        self.timeout, self.on_error, self.feedback = timeout, on_error, feedback
        self._run_all = functools.partial(run_all, workers=workers)
        if isolate:
            for one in self.rewards:
                _check_travels(one)
            self._run_all = ProcessPool(workers).run_all

    def score(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Scores whole groups (by group_id). Returns `reward/errors` and `reward/timeouts`, and per error reason the
        warnings in the log; raises RewardError with on_error=raise."""
        errors: Counter[str] = Counter()
        results = [self._results(reward, samples, errors) for reward in self.rewards]
        for sample, parts in zip(samples, zip(*results)):
            self._combine(sample, parts)
        return {name: float(errors[name]) for name in ("reward/errors", "reward/timeouts")}

    def _results(self, reward: Reward, samples: Sequence[Sample], errors: Counter[str]) -> list[RewardResult]:
        units = _groups(samples) if reward.group else [[i] for i in range(len(samples))]
        calls = [self._call(reward, [samples[i] for i in unit]) for unit in units]
        results: list[RewardResult] = [RewardResult(0.0)] * len(samples)
        for unit, outcome in zip(units, self._run_all(calls, self.timeout)):
            values = outcome if reward.group and not isinstance(outcome, Exception) else [outcome] * len(unit)
            if not isinstance(values, Sequence) or len(values) != len(unit):
                error = TypeError(f"a group reward returns a list of {len(unit)} results, not {values!r:.80}")
                values = [error] * len(unit)
            for i, value in zip(unit, values):
                results[i] = self._checked(reward, samples[i], value, errors)
        return results

    def _call(self, reward: Reward, unit: list[Sample]) -> Callable[[], Any]:
        return functools.partial(reward.fn, unit if reward.group else unit[0])

    def _checked(self, reward: Reward, sample: Sample, value: Any, errors: Counter[str]) -> RewardResult:
        try:
            return value if _is_sound(value) else _to_result(value)
        except Exception as error:  # what the reward raised comes back as its result; see run_all
            where = f"reward {reward.name!r} on prompt {sample.prompt.id}, sample {sample.index}"
            message = f"{where}: {type(error).__name__}: {error}"
            if self.on_error == "raise":
                raise RewardError(message) from error
            kind = "reward/timeouts" if isinstance(error, TimeoutError) else "reward/errors"
            if not errors[kind]:
                log.warning("%s (scored %s; further ones in this step are only counted)", message, self.on_error)
            errors[kind] += 1
            return RewardResult(float(self.on_error), details={"error": 1.0})

    def _combine(self, sample: Sample, parts: Sequence[RewardResult]) -> None:
        total = sum(reward.weight * part.score for reward, part in zip(self.rewards, parts))
        formats = [part.format_ok for part in parts if part.format_ok is not None]
        feedback = "\n".join(part.feedback.strip() for part in parts if part.feedback and part.feedback.strip())
        sample.reward_details = {}
        for reward, part in zip(self.rewards, parts):
            sample.reward_details[reward.name] = part.score
            sample.reward_details |= {f"{reward.name}/{key}": float(value) for key, value in part.details.items()}
        sample.reward = float(total)
        sample.feedback = feedback or None
        sample.format_ok = all(formats) if formats else None
        if self.feedback is not None:
            self.feedback.record(sample, RewardResult(sample.reward, sample.feedback, sample.format_ok))


def _check_travels(reward: Reward) -> None:
    try:
        pickle.dumps(reward.fn)
    except Exception as error:  # pickle raises what it likes
        raise ValueError(
            f"reward.isolate=true is not allowed with {reward.name!r}, which other processes cannot import: {error}"
        ) from error


def _groups(samples: Sequence[Sample]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(i)
    return [sorted(group, key=lambda i: samples[i].index) for group in groups.values()]


def _is_sound(value: Any) -> bool:
    return isinstance(value, RewardResult) and isinstance(value.score, float) and math.isfinite(value.score)


def _to_result(value: Any) -> RewardResult:
    """A number, `{"score": …, "feedback": …}` or RewardResult; raises what the reward raised, and TypeError or
    ValueError for everything that is no finite number."""
    if isinstance(value, Exception):
        raise value
    if isinstance(value, Mapping):
        check_keywords(RewardResult, value, "a reward's dict")
        value = RewardResult(**value)
    elif not isinstance(value, RewardResult):
        value = RewardResult(value)
    if value.score is None:
        raise TypeError("returned None: a reward is a number (0.0 is one)")
    try:
        score = float(value.score)
    except (TypeError, ValueError) as error:
        raise TypeError(f"returned {value.score!r:.80}: a reward is a number") from error
    if not math.isfinite(score):
        raise ValueError(f"returned {score}: a reward is a finite number")
    return RewardResult(score, value.feedback, value.format_ok, value.details)
