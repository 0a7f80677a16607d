"""Objects named in a configuration: import paths, built-in names, keyword arguments checked by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any


def did_you_mean(name: str, known: list[str]) -> str:
    """` Did you mean 'prompt'?` or nothing."""
    close = get_close_matches(str(name), known, n=3, cutoff=0.5)
    # Letters in another order are the likeliest slip, which the ratio alone does not tell from a wrong letter.
    best = next((other for other in close if sorted(other) == sorted(str(name))), close[0] if close else None)
    return f" Did you mean {best!r}?" if best else ""


def import_object(path: str) -> Any:
    """The object at `package.module.name` or `package.module:name`. ImportError says which part is missing."""
    module_path, _, name = path.replace(":", ".").rpartition(".")
    if not module_path:
        raise ImportError(f"{path!r} is not an import path: write package.module.name")
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        raise ImportError(f"{path!r} cannot be imported: {error}") from error
    if not hasattr(module, name):
        names = [n for n in vars(module) if not n.startswith("_")]
        raise ImportError(f"{path!r}: module {module_path} has no {name!r}.{did_you_mean(name, names)}")
    return getattr(module, name)


def accepted_keywords(target: Callable[..., Any]) -> list[str] | None:
    """Keyword names that a class or function takes, through `**kwargs` of a subclass's `__init__` up to its parents';
    None where anything goes."""
    if not inspect.isclass(target):
        parameters = inspect.signature(target).parameters.values()
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return (
            None if open_ended else [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        )
    names: list[str] = []
    for cls in target.__mro__:
        if cls is object:
            return names
        if "__init__" not in vars(cls):
            continue
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        names += [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names
    return None


def resolve(spec: Mapping[str, Any], builtin: Mapping[str, Any], what: str) -> tuple[Any, dict[str, Any]]:
    """The object that `{name: …}` or `{_target_: import.path}` means, and the keyword arguments beside it.

    Raises ValueError for an unknown name, ImportError for a path that leads nowhere.
    """
    kwargs = {str(key): value for key, value in spec.items()}
    target, name = kwargs.pop("_target_", None), kwargs.pop("name", None)
    if target is not None:
        return import_object(target), kwargs
    if name in builtin:
        return builtin[name], kwargs
    if name is None:
        raise ValueError(f"{what} has neither name ({', '.join(builtin)}) nor _target_ (an import path)")
    raise ValueError(
        f"{what}.name={name} does not exist.{did_you_mean(name, list(builtin))} "
        f"There are: {', '.join(builtin)}; or give _target_, an import path"
    )


def check_keywords(target: Callable[..., Any], kwargs: Mapping[str, Any], what: str, own: int = 0) -> None:
    """TypeError that names an unknown keyword argument and the accepted ones. `own`: how many leading parameters the
    caller fills itself (a reward function's sample)."""
    accepted = accepted_keywords(target)
    if accepted is None:
        return
    accepted = accepted[own:]
    for key in kwargs:
        if key not in accepted:
            name = getattr(target, "__name__", str(target))
            raise TypeError(
                f"{what}: {name} has no argument {key!r}.{did_you_mean(key, accepted)} "
                f"Accepted are: {', '.join(accepted) or 'none'}"
            )
