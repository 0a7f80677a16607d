"""Rules between fields, checked before anything is loaded. All mistakes at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlpost.config.compose import ConfigError
from rlpost.config.phase_checks import phase_mistakes
from rlpost.config.schema import Config, CriticConfig, ParallelConfig

if TYPE_CHECKING:
    from rlpost.algorithms.base import Algorithm

CHOICES = {
    "model.impl": ("auto", "local", "compiled", "transformer_engine"),
    "model.dtype": ("fp32", "bf16", "fp16"),
    "engine.name": ("torch", "sglang"),
    "engine.dtype": ("auto", "fp32", "bf16", "fp16"),
    "data.on_bad_row": ("error", "skip"),
    "data.on_long_prompt": ("error", "skip"),
    "data.last_batch": ("wrap", "drop", "keep"),
    "train.recompute": ("none", "selective", "full"),
    "optim.schedule": ("constant", "linear", "cosine"),
    "critic.schedule": ("constant", "linear", "cosine"),
    "rollout.canary": ("off", "first", "always"),
    "publish.verify": ("off", "first", "always"),
    "guards.action": ("off", "warn", "stop", "fallback"),
}
AT_LEAST = {
    "trainer.steps": 1,
    "trainer.keep": 1,
    "trainer.phase_timeout_s": 0,
    "rollout.prompts_per_step": 1,
    "rollout.samples_per_prompt": 1,
    "rollout.max_response_tokens": 1,
    "rollout.max_rounds": 1,
    "train.updates_per_rollout": 1,
    "train.max_tokens_per_micro_batch": 1,
    "train.max_skipped": 1,
    "data.max_prompt_tokens": 1,
    "publish.bucket_bytes": 1,
    "guards.window": 1,
    "guards.max_fallbacks": 1,
    "guards.length_factor": 1,
    "guards.reward_drop": 0,
    "engine.max_batch": 1,
    "engine.tensor_parallel": 1,
    "model.router_aux_loss": 0,
    "parallel.tensor": 1,
    "parallel.pipeline": 1,
    "parallel.context": 1,
    "parallel.expert": 1,
    "optim.lr": 0,
    "optim.clip_grad": 0,
    "optim.initial_loss_scale": 1,
    "optim.loss_scale_window": 1,
    "optim.loss_scale_hysteresis": 1,
    "critic.lr": 0,
    "critic.clip_grad": 0,
    "critic.initial_loss_scale": 1,
    "critic.loss_scale_window": 1,
    "critic.loss_scale_hysteresis": 1,
    "critic.alone_steps": 0,
}


def check_config(
    config: Config, objects: Mapping[str, Any] = MappingProxyType({}), *, ranks: int | None = None
) -> None:
    """Raise ConfigError with every broken rule. `objects` is what the caller brings as Python objects (data,
    reward, algorithm, feedback, filter): the fields in their place are not read. ranks: of the job; None: of this one.
    """
    mistakes = list(_mistakes(config, objects, int(os.environ.get("WORLD_SIZE", 1)) if ranks is None else ranks))
    if mistakes:
        raise ConfigError(mistakes)


def _mistakes(config: Config, objects: Mapping[str, Any], ranks: int) -> Iterator[str]:
    for key, allowed in CHOICES.items():
        if (value := _get(config, key)) not in allowed:
            yield f"{key}={value} is not allowed; allowed are {', '.join(allowed)}"
    for key, least in AT_LEAST.items():
        if (value := _get(config, key)) < least:
            yield f"{key}={value} is not allowed; it is at least {least}"
    yield from _file_mistakes(config, objects)
    yield from _fallback_mistakes(config, objects)
    yield from _parallel_mistakes(config, ranks)
    from rlpost.algorithms import build_algorithm

    yield from _component_mistakes(config, objects)
    try:
        algorithm = build_algorithm(objects.get("algorithm", config.algorithm))
    except (ValueError, TypeError, ImportError) as error:
        yield from str(error).splitlines()
    else:
        yield from _algorithm_mistakes(config, algorithm, objects)
        yield from _critic_mistakes(config, algorithm)
        yield from phase_mistakes(config, algorithm)


def _fallback_mistakes(config: Config, objects: Mapping[str, Any]) -> Iterator[str]:
    every, saved = config.trainer.eval_every, config.trainer.save_every
    if config.guards.action == "fallback" and (
        every < 1 or saved < 1 or saved % every or not (config.data.eval or objects.get("eval_data"))
    ):
        yield (
            f"guards.action=fallback goes back to the checkpoint with the best evaluation, so it needs data.eval, "
            f"trainer.eval_every={every} above 0 and trainer.save_every={saved} a multiple of it"
        )


def _algorithm_mistakes(config: Config, algorithm: Algorithm, objects: Mapping[str, Any]) -> Iterator[str]:
    """What the algorithm needs of the other groups."""
    if "rollout" in algorithm.needs and config.rollout.temperature <= 0:
        yield (
            f"rollout.temperature={config.rollout.temperature} is not allowed in training: log-probs are those at "
            "this temperature, so it must be above 0 (an eval set may have temperature 0)"
        )
    if config.reward is None and "reward" not in objects:
        wanting = {
            f"algorithm.name={algorithm.name}": "reward" in algorithm.needs,
            "data.eval": bool(config.data.eval),
            f"rollout.filter={config.rollout.filter}": config.rollout.filter is not None or "filter" in objects,
        }
        for who in (name for name, wants in wanting.items() if wants):
            yield f"{who} needs a reward: choose reward=choice, reward=exact, or bring one"
    if algorithm.group_relative and config.rollout.samples_per_prompt < 2:
        yield (
            f"rollout.samples_per_prompt={config.rollout.samples_per_prompt} is not allowed with "
            f"algorithm.name={algorithm.name}: its advantage compares a group's samples, so at least 2"
        )
    if "teacher" in algorithm.needs:
        if config.teacher is None:
            yield (
                f"algorithm.name={algorithm.name} needs a teacher: choose one of teacher=ema, ema_engine, static, "
                "periodic, trust_region, external, url"
            )
        elif config.teacher.get("url") is not None:
            yield from _url_mistakes(config, algorithm)
        elif config.teacher.get("backend") == "engine":
            yield from _engine_teacher_mistakes(config, algorithm)
        if config.feedback is None and "feedback" not in objects:
            yield f"algorithm.name={algorithm.name} needs feedback: choose one of feedback=sdpo, golden, opsd, opd"
    elif config.teacher is not None:
        yield f"teacher is set, but algorithm.name={algorithm.name} has no use for one: choose teacher=none"
    vocabulary = _model_config(config.model.path).get("vocab_size")
    if vocabulary and algorithm.top_k_needed > vocabulary:
        yield f"algorithm.top_k={algorithm.top_k_needed} is larger than the model's vocabulary of {vocabulary}"


def _url_mistakes(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """A server scores the sampled tokens alone, and at temperature 1."""
    url = f"teacher.url={config.teacher['url']}"
    if "teacher_distribution" in algorithm.needs:
        yield (
            f"{url} is not allowed with this algorithm: a server tells the log-probs of the sampled tokens, no whole "
            "distributions; choose mode=sampled with alpha=1, or of algorithm=opd the advantage (loss_coef=0 "
            "advantage_coef=1)"
        )
    if config.rollout.temperature != 1:
        yield f"{url} needs rollout.temperature=1, not {config.rollout.temperature}: servers score at temperature 1"


def _engine_teacher_mistakes(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """An engine tells the sampled tokens' log-probs and its own likeliest ids', of a model of the student's shape."""
    from rlpost.teacher import shape_differences

    backend = "teacher.backend=engine"
    if settings := list(algorithm.beyond_lists()):
        yield (
            f"{', '.join(settings)} is not allowed with {backend}: an engine tells the log-probs of the sampled tokens "
            "and of its own likeliest ids; choose mode=topk with top_k_ids=teacher and without entropy_gate, "
            "mode=sampled with alpha=1, or teacher.backend=swap"
        )
    if config.engine.name == "sglang" and config.rollout.temperature != 1:
        yield (
            f"rollout.temperature={config.rollout.temperature} is not allowed with {backend} and engine.name=sglang, "
            "which scores at temperature 1; choose rollout.temperature=1, or teacher.backend=swap"
        )
    directory = config.teacher.get("model")
    both_here = directory and _model_config(directory) and _model_config(config.model.path)
    if both_here and (differences := shape_differences(directory, config.model.path)):
        yield (
            f"teacher.model={directory} is not allowed with {backend}, as its shape is another than the student's: "
            f"{'; '.join(differences)}; choose teacher.backend=swap"
        )


def _critic_mistakes(config: Config, algorithm: Algorithm) -> Iterator[str]:
    names = [phase.name for phase in config.phases]
    if "values" not in algorithm.needs:
        for phase in config.phases:
            if phase.name in ("values", "critic") or any(r.startswith("critic.") for r in phase.residents):
                yield f"phase {phase.name!r} needs a critic; algorithm.name={algorithm.name} has none: change phases"
        if replace(config.critic, betas=tuple(config.critic.betas)) != CriticConfig():  # YAML has lists
            yield f"critic is set, but algorithm.name={algorithm.name} has no use for one: choose algorithm=ppo"
        return
    if {"values", "train"} <= set(names) and names.index("train") < names.index("values"):
        yield "phase 'train' stands before 'values', which its advantages need: change the order in phases"
    if 0 < config.trainer.steps <= config.critic.alone_steps:
        yield (
            f"critic.alone_steps={config.critic.alone_steps} leaves no step for the policy: it must be below "
            f"trainer.steps={config.trainer.steps}"
        )
    if config.critic.path is None:
        return
    if not (Path(config.critic.path) / "config.json").is_file():
        yield f"critic.path={config.critic.path} has no config.json: give a Hugging Face directory, or null"
        return
    policy, critic = _model_config(config.model.path), _model_config(config.critic.path)
    if policy and policy.get("vocab_size") != critic.get("vocab_size"):
        yield (
            f"critic.path={config.critic.path} has a vocabulary of {critic.get('vocab_size')}, the policy one of "
            f"{policy.get('vocab_size')}: both read the same tokens"
        )
    yield from _cut_mistakes(config.parallel, "the critic", critic)


def _component_mistakes(config: Config, objects: Mapping[str, Any]) -> Iterator[str]:
    """What the classes of teacher, feedback, reward and filter say of their own fields."""
    from rlpost.feedback import build_feedback
    from rlpost.rewards.judge import build_judge
    from rlpost.rollout.filters import build_filter
    from rlpost.teacher import build_teacher_config, directory_mistakes

    for name, values, build in (
        ("teacher", config.teacher, build_teacher_config),
        ("feedback", objects.get("feedback", config.feedback), build_feedback),
        ("reward", None if "reward" in objects else config.reward, build_judge),
        ("rollout", config.rollout.filter, build_filter),
    ):
        if values is None:
            continue
        try:
            built = build(values)
            if name == "feedback":
                built.validate(config)
            elif name == "teacher":
                yield from directory_mistakes(built, config.model.path)
                for directory in built.external().values():
                    yield from _cut_mistakes(config.parallel, f"the teacher {directory}", _model_config(directory))
        except (ValueError, TypeError, ImportError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            yield from (line if line.startswith(name) else f"{name}: {line}" for line in lines)


def _parallel_mistakes(config: Config, world: int) -> Iterator[str]:
    p = config.parallel
    model_ranks = p.tensor * p.pipeline * p.context
    if world % model_ranks:
        yield (
            f"{world} ranks cannot be cut into TP {p.tensor} × PP {p.pipeline} × CP {p.context} = {model_ranks}: "
            f"start a multiple of {model_ranks} (torchrun --nproc-per-node) or change parallel.*"
        )
    else:
        from rlpost.parallel import check_layout

        try:
            check_layout(p, world)
        except ValueError as error:
            yield str(error)
    model = _model_config(config.model.path)
    yield from _cut_mistakes(p, "the model", model)
    gpus, heads = config.engine.tensor_parallel, model.get("num_attention_heads")
    if config.engine.name == "sglang" and gpus > 0 and world % gpus:
        yield f"engine.tensor_parallel={gpus} does not divide the {world} ranks, of which each such group has an engine"
    if config.engine.name == "sglang" and gpus > 0 and heads and heads % gpus:
        yield f"engine.tensor_parallel={gpus} does not divide the model's {heads} attention heads, as SGLang needs"
    if config.engine.name == "sglang" and config.engine_dtype == "fp32":
        import torch

        if torch.cuda.is_available():
            yield (
                f"model.dtype={config.model.dtype} and engine.dtype={config.engine.dtype} make an engine in fp32, "
                "which engine.name=sglang cannot be on a GPU; set model.dtype=bf16, or engine.dtype=bf16"
            )
    against = against_compiled(p.tensor, bool(_experts(model)), config.train.recompute, config.train.overlap)
    if config.model.impl == "compiled" and against:
        yield f"model.impl=compiled is not allowed with {against}; choose model.impl=auto"
    if config.model.router_aux_loss and model and not _experts(model):
        yield f"model.router_aux_loss={config.model.router_aux_loss}: the model has no experts; set it to 0"


def _cut_mistakes(p: ParallelConfig, who: str, model: Mapping[str, Any]) -> Iterator[str]:
    """How the layout and the shape of a model do not fit. model: its config.json, empty where it is not here yet."""
    virtual = p.virtual_pipeline or 1
    layers = model.get("num_hidden_layers")
    if layers and layers < p.pipeline:
        yield f"parallel.pipeline={p.pipeline} is more than {who}'s {layers} layers"
    elif layers and virtual > 1 and p.pipeline > 0 and layers % (p.pipeline * virtual):
        yield (
            f"parallel.pipeline={p.pipeline} × parallel.virtual_pipeline={virtual} = {p.pipeline * virtual} does not "
            f"divide {who}'s {layers} layers, as virtual stages need"
        )
    experts = _experts(model)
    if p.expert > 1 and not experts:
        yield f"parallel.expert={p.expert}: {who} has no experts"
    elif experts and p.expert > 0 and experts % p.expert:
        yield f"parallel.expert={p.expert} does not divide {who}'s {experts} experts"
    cut = p.expert_tensor or 1
    if cut > 1 and not experts:
        yield f"parallel.expert_tensor={cut}: {who} has no experts"
    elif cut > 1 and (of_expert := model.get("moe_intermediate_size", model["intermediate_size"])) % cut:
        yield f"parallel.expert_tensor={cut} does not divide the width {of_expert} of {who}'s experts"
    if experts and p.tensor > 1 and not p.sequence:
        yield f"parallel.tensor={p.tensor} needs parallel.sequence=true where {who} has experts"
    width = model.get("intermediate_size")
    if width and width % p.tensor:
        yield f"parallel.tensor={p.tensor} does not divide {who}'s intermediate_size={width}"


def against_compiled(tensor: int, experts: bool, recompute: str | None, overlap: bool) -> str | None:
    """What forbids model.impl=compiled."""
    reasons = {
        f"parallel.tensor={tensor}": tensor > 1,
        "a model with experts": experts,
        "train.recompute=selective": recompute == "selective",
        "train.overlap=true": overlap,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _experts(model: Mapping[str, Any]) -> int | None:
    return model.get("num_experts") or model.get("num_local_experts")


def _file_mistakes(config: Config, objects: Mapping[str, Any]) -> Iterator[str]:
    path = Path(config.model.path)
    if "model" not in objects:
        looks_local = path.is_absolute() or config.model.path.startswith(".") or config.model.path.count("/") != 1
        if path.is_dir() and not (path / "config.json").is_file():
            yield f"model.path={path} has no config.json: it is not a Hugging Face model directory"
        elif path.is_dir():
            yield from _weight_mistakes(path)
        elif looks_local:
            yield f"model.path={path} does not exist: give a Hugging Face directory (or a hub id, owner/name)"
    if "data" not in objects:
        train = config.data.train.values() if isinstance(config.data.train, dict) else [config.data.train]
        for source in (one for given in train for one in (given if isinstance(given, list) else [given])):
            yield from _missing_file("data.train", source)
    for name, spec in config.data.eval.items():
        if isinstance(spec, dict) and "path" not in spec:
            yield f"data.eval.{name} has no path: give data.eval.{name}.path"
            continue
        yield from _missing_file(f"data.eval.{name}", spec["path"] if isinstance(spec, dict) else spec)
    if config.trainer.resume not in ("auto", "never") and not Path(config.trainer.resume).is_dir():
        yield f"trainer.resume={config.trainer.resume} is neither auto, never nor a directory"


def _weight_mistakes(path: Path) -> Iterator[str]:
    from rlpost.policy.hf_io import weight_files

    try:
        weight_files(path)
    except (FileNotFoundError, ValueError) as error:
        yield f"model.path: {error}"


def _missing_file(key: str, source: Any) -> Iterator[str]:
    if isinstance(source, str) and Path(source).suffix in (".jsonl", ".json", ".parquet") and not Path(source).exists():
        yield f"{key}={source} does not exist"


def _model_config(directory: str) -> dict[str, Any]:
    path = Path(directory) / "config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _get(config: Config, key: str) -> Any:
    group, field = key.split(".")
    return getattr(getattr(config, group), field)
