"""From a recipe's name and overrides to one typed `Config`. Hydra is known here and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlpost.config.schema import Config
from rlpost.imports import did_you_mean

# Their keys belong to the class that the group names: that class says which exist.
OPEN_GROUPS = ("algorithm", "teacher", "feedback", "reward", "data.eval", "engine.extra", "data.chat_template_kwargs")


class ConfigError(ValueError):
    """Every mistake of a configuration, one sentence each."""

    def __init__(self, mistakes: Sequence[str]):
        self.mistakes = list(mistakes)
        count = f"{len(self.mistakes)} mistakes" if len(self.mistakes) > 1 else "a mistake"
        super().__init__(f"The configuration has {count}:\n" + "\n".join(f"  - {m}" for m in self.mistakes))


def files_root() -> Path:
    """The folder that holds `conf/` and `recipes/`: the checkout, or the package data of an installed wheel."""
    packaged = Path(__file__).parents[1] / "_files"
    return packaged if packaged.is_dir() else Path(__file__).parents[3]


def recipe_folders() -> list[Path]:
    """Where recipes are looked for: the working directory's own `recipes/` first."""
    folders = [Path.cwd() / "recipes", files_root() / "recipes"]
    return [folder for i, folder in enumerate(folders) if folder.is_dir() and folder not in folders[:i]]


def recipe_names() -> list[str]:
    return sorted({path.stem for folder in recipe_folders() for path in folder.glob("*.yaml")})


def compose_config(recipe: str | None, overrides: Sequence[str] = ()) -> DictConfig:
    """The resolved configuration as Hydra composes it. Raises ConfigError with what to change."""
    if recipe is not None and recipe not in recipe_names():
        raise ConfigError([_unknown("recipe", recipe, recipe_names())])
    ConfigStore.instance().store(name="base", node=Config)
    search = ",".join(f"file://{folder.parent}" for folder in recipe_folders())
    arguments = [f"hydra.searchpath=[{search}]", *(_open(o) for o in overrides)]
    if recipe is not None:
        arguments.insert(1, f"recipes={recipe}")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(files_root() / "conf"), version_base="1.3"):
            composed = compose("config", arguments)
            OmegaConf.resolve(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_explain(error, overrides)]) from error
    except AssertionError as error:  # what OmegaConf raises where a field is put into a null
        dotted = [o for o in overrides if o.split(".")[0] in ("teacher", "feedback", "reward") and "." in o]
        raise ConfigError([f"{', '.join(dotted)}: a field of a group that is none; choose the group first"]) from error
    return composed


def split_recipe(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """recipe=NAME, and the other overrides."""
    recipe = next((a.split("=", 1)[1] for a in arguments if a.startswith("recipe=")), None)
    return recipe, [a for a in arguments if not a.startswith("recipe=")]


def load_config(recipe: str | None, overrides: Sequence[str] = ()) -> Config:
    return to_config(compose_config(recipe, overrides))


def to_config(composed: DictConfig | dict[str, Any]) -> Config:
    """Plain values into the dataclasses; a field that must be given and is not is a mistake by name."""
    if isinstance(composed, dict):
        composed = OmegaConf.merge(OmegaConf.structured(Config), composed)
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ConfigError([f"{key} is not set: give it in the recipe or as {key}=…" for key in missing])
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    return config


def dump_config(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def config_values(config: Config) -> dict[str, Any]:
    """The resolved configuration as plain values; `to_config` is the way back."""
    return OmegaConf.to_container(OmegaConf.structured(config), resolve=True)


def load_saved_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The resolved configuration that a run wrote, with overrides on top."""
    if not path.is_file():
        raise ConfigError([f"{path} does not exist: {path.parent} is not a run directory"])
    try:
        saved = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
        return to_config(OmegaConf.merge(saved, OmegaConf.from_dotlist(list(overrides))))
    except OmegaConfBaseException as error:
        raise ConfigError([_explain(error, overrides)]) from error


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted fields of two configurations' `config_values` that differ: {field: (old, new)}."""
    found = {}
    for key in dict.fromkeys([*old, *new]):
        values = old.get(key), new.get(key)
        if values[0] == values[1]:
            continue
        if isinstance(values[0], Mapping) and isinstance(values[1], Mapping):
            found |= differences(*values, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = values
    return found


def _open(override: str) -> str:
    """`algorithm.x=1` may name a key that the group's YAML does not list; the class will judge it. Eval sets are named
    by whoever writes them."""
    bare = override.lstrip("+~")
    opened = [f"{group}." for group in OPEN_GROUPS] + ["data.eval="]
    if bare == override and bare.startswith(tuple(opened)):
        return f"++{override}"
    return override


def field_names(prefix: str = "", node: Any = Config) -> list[str]:
    """Every dotted field of the schema."""
    names = []
    for f in fields(node):
        default = f.default_factory() if callable(f.default_factory) else None
        name = f"{prefix}{f.name}"
        names.extend(field_names(f"{name}.", type(default)) if is_dataclass(default) else [name])
    return names


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    text = str(error).strip()
    cause = str(error.__cause__ or "").strip()
    if isinstance(error, OverrideParseException):
        name, equals, value = error.override.partition("=")
        if not equals or not re.fullmatch(r"[+~]*\w[\w./@]*", name):
            return f"{error.override!r} is no override: write group.key=value, without dashes or blanks before the ="
        return f"{error.override} cannot be read: a value with such signs stands in quotes, as in '{name}=\"{value}\"'"
    if match := re.search(r"Ambiguous value for argument '([^']+)'", text):
        key, _, value = match.group(1).partition("=")
        return f"{key}={value} is several values: a list is '{key}=[{value}]', one text '{key}=\"{value}\"'"
    if match := re.search(r"(?:Could not override '|Error merging override )([^'=]+)(?:=(.*))?", text):
        key, value = match.group(1).lstrip("+"), match.group(2)
        if "is not in struct" in text + cause or "not in" in cause:
            return _unknown("field", key, field_names())
        if value is None:
            value = next((o.split("=", 1)[1] for o in overrides if o.lstrip("+").startswith(f"{key}=")), "?")
        reason = (cause or text).splitlines()[0]
        return f"{key}={value} is not allowed: {reason}"
    if match := re.search(r"In '[^']*': Could not find '(\w+)/([^']+)'", text):
        group, choice = match.groups()
        options = sorted(p.stem for p in (files_root() / "conf" / group).glob("*.yaml"))
        return _unknown(group, choice, options)
    if match := re.search(r"Environment variable '(\w+)' not found", text + cause):
        key = re.search(r"full_key: (\S+)", text + cause)
        where = f", which {key.group(1)} is read from," if key else ""
        return f"The environment variable {match.group(1)}{where} is not set: export it, or give the field itself"
    return "\n    ".join(line for line in [text, cause if cause not in text else ""] if line)


def _unknown(kind: str, name: str, allowed: Sequence[str]) -> str:
    hint = did_you_mean(name, list(allowed))
    group = [a for a in allowed if "." in name and a.startswith(name.rsplit(".", 1)[0] + ".")]
    listed = group or dict.fromkeys(a.split(".")[0] for a in allowed)
    return f"There is no {kind} {name!r}.{hint} There are: {', '.join(listed)}"
