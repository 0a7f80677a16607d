"""A run on disk: is this directory ours, what a checkpoint holds, how it is put back, the export."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

from rlpost.config.compose import ConfigError, config_values, differences, dump_config, load_saved_config, to_config
from rlpost.config.schema import Config
from rlpost.observe.metrics import read_metrics
from rlpost.policy.hf_config import DTYPES
from rlpost.weights.checkpoint import CheckpointStore, versions
from rlpost.weights.checkpoint_reader import Checkpoint, CheckpointError
from rlpost.weights.export import save_pretrained
from rlpost.weights.rank_state import rng_state, set_rng_state
from rlpost.weights.shards import replace_text
from rlpost.weights.snapshots import STUDENT

if TYPE_CHECKING:
    from rlpost.assemble import Rooms
    from rlpost.policy.megatron import MegatronPolicy

MOMENTS = ("master", "exp_avg", "exp_avg_sq")
# A run that goes on may change its length, its logging, its layout, its hyperparameters; not what it is.
FIXED = (
    "model.path",
    "data.train",
    "algorithm.name",
    "algorithm._target_",
    "run.seed",
    "rollout.prompts_per_step",
    "rollout.samples_per_prompt",
)
# Not worth a word: where the run is, and how it was found.
UNTOLD = ("run.dir", "run.name", "trainer.resume")

# Metrics that say nothing of the model.
UNCARDED = ("step", "nonfinite", "perf", "publish")


def run_directory(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name


def saved_config(directory: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of an existing run, ready to go on where it stands."""
    config = load_saved_config(directory / "config.yaml", overrides)
    config.run.dir, config.run.name = str(directory.parent), directory.name
    return config


def find_checkpoint(config: Config) -> Checkpoint | None:
    """What this run starts from; ConfigError where the directory holds another run."""
    directory = run_directory(config)
    if config.trainer.resume == "never":
        if CheckpointStore(directory / "checkpoints").latest() is not None:
            raise ConfigError(
                [f"trainer.resume=never, but {directory} holds checkpoints: choose another run.name, or move it away"]
            )
        return None
    source = directory if config.trainer.resume == "auto" else Path(config.trainer.resume)
    if source.name.startswith("step_"):
        store, wanted = CheckpointStore(source.parent), int(source.name.removeprefix("step_"))
    else:
        store, wanted = CheckpointStore(source / "checkpoints"), None
    wanted = store.latest() if wanted is None else wanted
    if wanted is None:
        if config.trainer.resume != "auto":
            raise ConfigError([f"trainer.resume={source} holds no checkpoint"])
        return None
    checkpoint = store.load(wanted)
    _refuse_another_run(checkpoint, config)
    return checkpoint


def _refuse_another_run(checkpoint: Checkpoint, config: Config) -> None:
    changed = differences(_known_config(checkpoint), config_values(config))
    refused = [
        f"{key} was {old!r} and is now {new!r}"
        for key, (old, new) in changed.items()
        if key in FIXED and not _moved(old, new)
    ]
    if refused:
        raise ConfigError(
            [f"{checkpoint.path} holds another run: {'; '.join(refused)}. Choose another run.name to start anew"]
        )


def _changes(checkpoint: Checkpoint, config: Config) -> Iterator[str]:
    """What is not as it was when the checkpoint was written: fields and versions."""
    for key, (old, new) in differences(_known_config(checkpoint), config_values(config)).items():
        if key not in UNTOLD:
            yield f"{key}={new!r} (was {old!r})"
    installed = versions()
    for package in sorted(checkpoint.versions.keys() | installed.keys()):
        old, new = (found.get(package, "not installed") for found in (checkpoint.versions, installed))
        if old != new:
            yield f"{package} {new} (was {old})"


def _known_config(checkpoint: Checkpoint) -> dict[str, Any]:
    if checkpoint.config is None:
        raise CheckpointError(f"{checkpoint.path} holds no configuration: an earlier rlpost wrote it")
    return checkpoint.config


def _moved(old: Any, new: Any) -> bool:
    """A path that is gone has moved: what lies there now is compared by its content (tensors, data fingerprint)."""
    return isinstance(old, str) and os.path.isabs(old) and not os.path.exists(old) and os.path.exists(str(new))


def save_checkpoint(rooms: Rooms, step: int, *, background: bool = False) -> Path:
    """Collective. The kinds are whole fp32 tensors under Hugging Face names: any layout of ranks can load them.

    background: see `CheckpointStore.save`."""
    policy, snapshots = rooms.policy, rooms.snapshots
    tensors = {kind: partial(policy.optimizer_tensors, kind) for kind in MOMENTS}
    if rooms.critic is not None:
        tensors |= {f"critic.{kind}": partial(rooms.critic.model.optimizer_tensors, kind) for kind in MOMENTS}
    for tag in snapshots.tags():
        tensors[f"tag.{tag}"] = partial(policy.gather_masters, snapshots.tensors(tag))
    state = {
        "step": step,
        "data": rooms.data.state(),
        "algorithm": rooms.algorithm.state_dict(),
        "teacher": rooms.teacher.state_dict() if rooms.teacher is not None else None,
        "guards": rooms.guards.state_dict(),
        "optimizer": policy.optimizer_scalars(),
        "critic": rooms.critic.model.optimizer_scalars() if rooms.critic is not None else None,
        "version": rooms.publisher.named,
    }
    return rooms.checkpoints.save(
        step,
        tensors,
        state,
        rng_state(),
        config=config_values(rooms.config),
        background=background,
        keep_also=rooms.guards.best([*rooms.checkpoints.steps(), step]),
    )


def restore_checkpoint(rooms: Rooms, checkpoint: Checkpoint | None) -> int:
    """Put everything back; the number of steps done."""
    if checkpoint is None:
        return 0
    _restore_training(rooms, checkpoint)
    rooms.data.load_state(checkpoint.state["data"])
    rooms.publisher.resume(checkpoint.state["version"])
    rooms.guards.load_state_dict(checkpoint.state["guards"])
    set_rng_state(checkpoint.rank_state)
    rooms.observer.say(f"resumed from {checkpoint.path}")
    for change in _changes(checkpoint, rooms.config):
        rooms.observer.say(f"resumed with {change}")
    return checkpoint.state["step"]


def fall_back(rooms: Rooms, step: int) -> bool:
    """What is trained becomes what it was in the best checkpoint: weights, moments, teacher, reference, critic, the
    algorithm's own state. Steps, data and learning rate go on, or the same run would come again. False where there is
    no such checkpoint, or where it was done often enough. Collective."""
    guards, most, say = rooms.guards, rooms.config.guards.max_fallbacks, rooms.observer.say
    rooms.checkpoints.finish()
    best = guards.best(rooms.checkpoints.steps())
    if best is None or guards.fallbacks == most:
        why = "no checkpoint was evaluated yet" if best is None else f"guards.max_fallbacks={most} were done"
        say(f"step {step}: cannot fall back, as {why}: stopping")
        return False
    trained = [rooms.policy] + ([rooms.critic.model] if rooms.critic is not None else [])
    calls = [model.optimizer_scalars()["calls"] for model in trained]  # of the schedule
    _restore_training(rooms, rooms.checkpoints.load(best))
    for model, number in zip(trained, calls):
        model.load_optimizer_scalars({**model.optimizer_scalars(), "calls": number})
    guards.fell_back()
    say(
        f"step {step}: fell back to the weights of step {best}, whose evaluation was {guards.scores[best]:.4g}, the "
        f"best that is kept ({guards.fallbacks} of {most}); steps and data go on"
    )
    return True


def _restore_training(rooms: Rooms, checkpoint: Checkpoint) -> None:
    policy, snapshots = rooms.policy, rooms.snapshots
    shapes = policy.hf_shapes()
    _restore_optimizer(policy, checkpoint, "", checkpoint.state["optimizer"])
    if rooms.critic is not None:
        _restore_optimizer(rooms.critic.model, checkpoint, "critic.", checkpoint.state["critic"])
    for tag in snapshots.tags():
        snapshots.put(tag, policy.scatter_masters(checkpoint.tensors(f"tag.{tag}", shapes).__getitem__))
    rooms.algorithm.load_state_dict(checkpoint.state["algorithm"])
    if rooms.teacher is not None:
        rooms.teacher.load_state_dict(checkpoint.state["teacher"])


def _restore_optimizer(
    model: MegatronPolicy, checkpoint: Checkpoint, prefix: str, scalars: Mapping[str, float]
) -> None:
    shapes = model.hf_shapes()
    for kind in MOMENTS:
        model.load_optimizer_tensors(kind, checkpoint.tensors(f"{prefix}{kind}", shapes).__getitem__)
    model.load_optimizer_scalars(dict(scalars))


def write_provider(rooms: Rooms) -> None:
    """provider.json beside the run's config.yaml: Megatron's configuration of the model, as it was resolved."""
    if rooms.agreement.rank == 0:
        provider = {
            "megatron-core": versions().get("megatron-core"),
            "transformer_config": {
                f.name: _plain(getattr(rooms.policy.transformer_config, f.name))
                for f in fields(rooms.policy.transformer_config)
            },
        }
        replace_text(rooms.directory / "provider.json", json.dumps(provider, indent=2) + "\n")


def _plain(value: Any) -> Any:
    """As JSON: what has no form there by its name (dtypes, functions, choices)."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_plain(item) for item in value]
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case partial():
            given = [str(_plain(item)) for item in value.args] + [f"{k}={_plain(v)}" for k, v in value.keywords.items()]
            return f"{_plain(value.func)}({', '.join(given)})"
        case FunctionType() | BuiltinFunctionType() | type():
            return f"{value.__module__}.{value.__qualname__}"
        case _:
            return str(value)


def export(rooms: Rooms, step: int, directory: str | Path | None) -> Path:
    """Collective: the Hugging Face directory of the current weights."""
    target = Path(directory) if directory is not None else rooms.directory / "export"
    config = rooms.config
    dtype = DTYPES[config.model.dtype]
    card = _card(config, step, rooms.observer.rows())
    return save_pretrained(target, rooms.policy.hf_tensors(dtype), config.model.path, rooms.tokenizer, dtype, card=card)


def export_checkpoint(
    run: str | Path,
    step: int | None = None,
    tag: str = STUDENT,
    dtype: str | None = None,
    out: str | Path | None = None,
    model: str | Path | None = None,
) -> Path:
    """The Hugging Face directory of a checkpoint, without its trainer: one process, one tensor in memory at a time.

    step: None is the latest. tag: student, or what else the checkpoint holds (teacher, reference). dtype: fp32, bf16 or
    fp16, None is the one that was trained in. out: default `<run>/export`, with step and tag in its name where given.
    model: where config.json and the tokenizer are, if not in the run's model.path any more. Raises CheckpointError,
    ExportError, or ValueError with what there is instead.
    """
    from transformers import AutoTokenizer

    store = CheckpointStore(Path(run) / "checkpoints")
    if not store.steps():
        raise ValueError(f"{run} holds no checkpoint: {store.directory} has no step_*")
    checkpoint = store.load("latest" if step is None else step, verify=False)
    config = to_config(_known_config(checkpoint))
    kind = "master" if tag == STUDENT else f"tag.{tag}"
    if kind not in checkpoint.kinds:
        tags = [STUDENT, *(k.removeprefix("tag.") for k in checkpoint.kinds if k.startswith("tag."))]
        raise ValueError(f"{checkpoint.path} has no tag {tag!r}. There are: {', '.join(tags)}")
    source = Path(config.model.path if model is None else model)
    if not (source / "config.json").is_file():
        raise ValueError(f"{source} has no config.json: say where the model that was trained is, with --model DIR")
    checkpoint.check_sums(kind)
    names = ["export", *([] if step is None else [checkpoint.path.name]), *([] if tag == STUDENT else [tag])]
    chosen = dtype or config.model.dtype
    rows = read_metrics(run) if (Path(run) / "metrics.jsonl").is_file() else []
    card = _card(config, checkpoint.step, rows) | {"weights": tag, "versions": checkpoint.versions}
    return save_pretrained(
        Path(out) if out is not None else Path(run) / "-".join(names),
        checkpoint.tensors(kind).items(),
        source,
        AutoTokenizer.from_pretrained(source),
        DTYPES[chosen],
        card=card,
    )


def _card(config: Config, step: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the model card tells of a run after `step` steps, by the lines of its metrics."""
    past = [row for row in rows if row["step"] <= step]
    last: dict[str, Any] = {}
    for row in past:
        last |= row
    return {
        "recipe": config.run.name,
        "algorithm": config.algorithm.get("name") or config.algorithm.get("_target_"),
        "data": config.data.train,
        "steps": step,
        "curve": [(row["step"], row["rollout/reward/mean"]) for row in past if "rollout/reward/mean" in row],
        "metrics": {name: value for name, value in last.items() if name.split("/")[0] not in UNCARDED},
        "configuration": dump_config(config),
    }
