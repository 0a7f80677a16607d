"""`rlpost plan recipe=NAME …`: the arithmetic of a step and the bytes of each phase, before a model is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost.config.compose import load_config, split_recipe
from rlpost.config.schema import Config
from rlpost.observe.progress import human_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rlpost.config.schema import ParallelConfig

GIB = 2**30
MASTER, MOMENTS = 4, 8  # bytes of a parameter's fp32 master and of Adam's two


@dataclass(frozen=True)
class Parameters:
    """Counts of parameters: of one rank, and of those that its data-parallel peers hold too."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True)
class Layout:
    """How many ranks cut what. `shard` ranks share the optimizer's state, `expert_shard` ranks that of an expert."""

    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    expert_tensor: int

    @property
    def shard(self) -> int:
        return self.data * self.context

    @property
    def expert_shard(self) -> int:
        ranks = self.tensor * self.pipeline * self.context * self.data
        return ranks // (self.expert * self.expert_tensor * self.pipeline)

    def __str__(self) -> str:
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.name.startswith("expert")}
        return " × ".join(f"{name} {size}" for name, size in sizes.items())


def layout_of(parallel: ParallelConfig, data: int) -> Layout:
    from rlpost.parallel import expert_tensor

    sizes = parallel.tensor, parallel.pipeline, parallel.context
    return Layout(*sizes, data, parallel.expert, expert_tensor(parallel))


def parameters_of_stage(hf: PreTrainedConfig, layout: Layout, stage: int) -> Parameters:
    """Of one rank of pipeline stage `stage`: layers as Megatron deals them, the embedding on the first, the head on the
    last (a copy where it is tied)."""
    from rlpost.parallel import layers_of_stages
    from rlpost.policy.hf_config import head_dim
    from rlpost.policy.hf_map import padded_groups, padded_vocabulary

    H, D, tp = hf.hidden_size, head_dim(hf), layout.tensor
    layers = layers_of_stages(hf.num_hidden_layers, layout.pipeline)[stage]
    groups = padded_groups(hf.num_key_value_heads, tp)
    heads = groups * (hf.num_attention_heads // hf.num_key_value_heads)
    qkv = (heads + 2 * groups) * D
    layer = (H * qkv + heads * D * H) // tp + 2 * H
    if hf.model_type == "qwen2":
        layer += qkv // tp
    if hf.model_type in ("qwen3", "qwen3_moe"):
        layer += 2 * D
    experts = getattr(hf, "num_local_experts", None)
    of_experts = 0
    if experts is None:
        layer += 3 * H * hf.intermediate_size // tp
    else:
        layer += experts * H
        width = getattr(hf, "moe_intermediate_size", hf.intermediate_size)
        of_experts = experts // layout.expert * 3 * H * width // layout.expert_tensor
    table = padded_vocabulary(hf.vocab_size, tp) // tp * H
    first, last = stage == 0, stage == layout.pipeline - 1
    ends = table * first + H * last
    if last and not (first and hf.tie_word_embeddings):
        ends += table
    return Parameters(layers * layer + ends, layers * of_experts)


def trained_bytes(parameters: Parameters, layout: Layout, itemsize: int) -> dict[str, int]:
    """weights, gradients (fp32) and optimizer state of one rank; fp32 weights are their own masters."""
    shard = math.ceil(parameters.dense / layout.shard) + math.ceil(parameters.experts / layout.expert_shard)
    return {
        "weights": parameters.total * itemsize,
        "gradients": parameters.total * 4,
        "optimizer": shard * (MOMENTS if itemsize == 4 else MASTER + MOMENTS),
    }


def activation_bytes(hf: PreTrainedConfig, layout: Layout, tokens: int, itemsize: int, recompute: str) -> int:
    """About what the backward of `tokens` tokens finds stored on the stage that keeps most micro-batches: inputs and
    outputs of norms, the projections of attention, gate, up and their product; with recompute=full one layer of these
    and each layer's input."""
    from rlpost.parallel import layers_of_stages
    from rlpost.policy.hf_config import head_dim

    H, D = hf.hidden_size, head_dim(hf)
    query, key = hf.num_attention_heads * D, hf.num_key_value_heads * D
    width = getattr(hf, "moe_intermediate_size", hf.intermediate_size) * getattr(hf, "num_experts_per_tok", 1)
    attention = (query + 2 * key) + (query + key) + query
    if hf.model_type in ("qwen3", "qwen3_moe"):
        attention += query + key
    layer = 4 * H + (attention + 3 * width) // layout.tensor
    layers = layers_of_stages(hf.num_hidden_layers, layout.pipeline)[0]
    kept = {
        "none": layers * layer,
        "selective": layers * (layer - 3 * width // layout.tensor),
        "full": layers * H + layer,
    }
    return tokens * itemsize * kept[recompute] * layout.pipeline


@dataclass(frozen=True)
class Plan:
    """lines: what is printed. needed, device_bytes: the fullest phase's bytes and the device's; over is an error."""

    lines: list[str]
    needed: int
    device_bytes: int


def make_plan(config: Config, ranks: int, device_bytes: int, device: str, *, moves: bool = True) -> Plan:
    """moves: residents leave the device between phases, as they do on a GPU."""
    from transformers import AutoTokenizer

    from rlpost.algorithms import build_algorithm
    from rlpost.assemble import phases_of
    from rlpost.data.dataset import PromptDataset
    from rlpost.parallel import check_layout
    from rlpost.policy.hf_config import DTYPES, read_config

    layout = layout_of(config.parallel, data := check_layout(config.parallel, ranks))
    hf = read_config(config.model.path)
    algorithm = build_algorithm(config.algorithm)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    rollout = "rollout" in algorithm.needs
    prompts = PromptDataset(config.data, tokenizer, None, config.run.seed, responses=not rollout).prompts
    lengths = [len(prompt.ids) for prompt in prompts]
    stages = [parameters_of_stage(hf, layout, stage) for stage in range(layout.pipeline)]
    whole = parameters_of_stage(hf, Layout(1, 1, 1, 1, 1, 1), 0).total
    lines = [
        f"{config.model.path}: {hf.model_type}, {hf.num_hidden_layers} layers, {_millions(whole)} parameters, "
        f"trained in {config.model.dtype}",
        f"ranks: {ranks} = {layout}" + (f"; experts over {layout.expert}" if layout.expert > 1 else ""),
        "",
        *_arithmetic(config, layout, lengths, rollout),
        "",
    ]
    itemsize = DTYPES[config.model.dtype].itemsize
    sizes: dict[str, int] = {}
    for name in ("weights", "gradients", "optimizer"):
        sizes[f"policy.{name}"] = max(trained_bytes(stage, layout, itemsize)[name] for stage in stages)
        sizes[f"critic.{name}"] = sizes[f"policy.{name}"] if "values" in algorithm.needs else 0
    swapped, others = _teachers(config)
    sizes["teacher.weights"] = itemsize * sum(
        max(parameters_of_stage(read_config(path), layout, stage).total for stage in range(layout.pipeline))
        for path in others
    )
    if rollout:
        beside = {name for phase in phases_of(config) if phase.name == "publish" for name in phase.residents}
        free = device_bytes - sum(size for name, size in sizes.items() if name in beside)
        sizes |= _engine_bytes(config, hf, whole, DTYPES[config.engine_dtype].itemsize, max(lengths), data, free)
        sizes["teacher.engine"] = sizes["engine.weights"] + sizes["engine.kv_cache"]  # where a phase names it
    micro = config.train.max_tokens_per_micro_batch
    activations = activation_bytes(hf, layout, micro, itemsize, config.train.recompute)
    table, needed = _table(config, sizes, activations, moves)
    lines += [*table, "", *_host(stages, layout, swapped, algorithm.needs)]
    if moves:
        lines += _away(config, sizes)
    verdict = "" if needed <= device_bytes else ", too little: see train.max_tokens_per_micro_batch, parallel.*"
    lines.append(f"{device}: {human_bytes(device_bytes)}{verdict}")
    return Plan(lines, needed, device_bytes)


def _arithmetic(config: Config, layout: Layout, lengths: Sequence[int], rollout: bool) -> Iterator[str]:
    prompts, samples = config.rollout.prompts_per_step, config.rollout.samples_per_prompt if rollout else 1
    mean = sum(lengths) / len(lengths)
    budget = config.train.max_tokens_per_micro_batch * layout.context
    step, responses = f"{prompts} rows", ""
    if rollout:
        step = f"{prompts} prompts × {samples} samples = {prompts * samples} samples"
        responses = f"; responses of up to {config.rollout.max_response_tokens}"
    yield f"a step: {step}; prompts of {mean:.0f} tokens in the mean, {max(lengths)} at most{responses}"
    longest = config.rollout.max_response_tokens if rollout else 0
    tokens = round(prompts * (mean + samples * longest))  # samples of a group run their prompt once
    updates = min(config.train.updates_per_rollout, prompts)
    micros = max(1, math.ceil(tokens / updates / layout.data / budget))
    yield (
        f"        up to {tokens:,} tokens to train, in {updates} update{'s' * (updates > 1)} of about {micros} "
        f"micro-batch{'es' * (micros > 1)} of {budget:,} on each of {layout.data} data-parallel ranks"
    )
    yield f"        {len(lengths):,} prompts: {len(lengths) / prompts:.1f} steps an epoch, {config.trainer.steps} steps"


def _engine_bytes(
    config: Config, hf: PreTrainedConfig, parameters: int, itemsize: int, longest: int, data: int, free: int
) -> dict[str, int]:
    """free: on the device as the engine starts."""
    from rlpost.policy.hf_config import head_dim

    weights = parameters * itemsize // config.engine.tensor_parallel
    if config.engine.name == "sglang":  # takes its share whole
        cache = max(0, int(config.engine.memory_fraction * free) - weights)
    else:
        samples = math.ceil(config.rollout.prompts_per_step * config.rollout.samples_per_prompt / data)
        rows = min(config.engine.max_batch, samples)
        row = 2 * hf.num_hidden_layers * hf.num_key_value_heads * head_dim(hf) * itemsize
        cache = rows * (longest + config.rollout.max_response_tokens) * row
    return {"engine.weights": weights, "engine.kv_cache": cache}


def _table(config: Config, sizes: dict[str, int], activations: int, moves: bool) -> tuple[list[str], int]:
    """A line a phase: what is on the device meanwhile. moves: the rest is not there (on the CPU everything stays)."""
    from rlpost.assemble import phases_of

    held = sum(size for name, size in sizes.items() if name not in ("engine.kv_cache", "teacher.engine"))
    lines, needed = [f"{'phase':16s} {'':10s} what it holds"], 0
    for phase in phases_of(config):
        used = {name: sizes[name] for name in phase.residents if sizes.get(name)}
        if phase.name in ("train", "critic"):
            used["activations (about)"] = activations
        there = sum(used.values())
        if not moves:
            there = held + sum(
                size
                for name, size in used.items()
                if name not in sizes or name in ("engine.kv_cache", "teacher.engine")
            )
        elif (state := {"train": "policy.optimizer", "critic": "critic.optimizer"}.get(phase.name)) not in (
            None,
            *used,
        ):
            needed = max(needed, there - activations + sizes[state])  # optim.offload: it comes for the update
        needed = max(needed, there)
        parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in used.items())
        lines.append(f"{phase.name:16s} {human_bytes(sum(used.values())):>10s} {parts}".rstrip())
    why = "the rest is in host memory, or given back" if moves else "as on the CPU nothing moves between phases"
    lines.append(f"{'at most at once':16s} {human_bytes(needed):>10s} {why}")
    return lines, needed


def _teachers(config: Config) -> tuple[int, list[str]]:
    """(teachers kept as snapshots of the student's shape, directories of those that are models of their own)."""
    from rlpost.teacher import build_teacher_config, shape_differences

    if config.teacher is None:
        return 0, []
    teacher = build_teacher_config(config.teacher)
    external = list(teacher.external().values())
    others = [path for path in external if shape_differences(path, config.model.path)]
    own_past = not external and teacher.url is None
    return len(external) - len(others) + own_past, others


def _host(stages: Sequence[Parameters], layout: Layout, teachers: int, needs: frozenset[str]) -> Iterator[str]:
    """Snapshots: fp32 shards in the host's memory."""
    shard = max(math.ceil(s.dense / layout.shard) + math.ceil(s.experts / layout.expert_shard) for s in stages) * 4
    tags = ["teacher"] * teachers + ["reference"] * ("reference_logprobs" in needs)
    if tags:
        copies = len(tags) + 1  # the student's, while another has the model
        yield f"host memory of a rank: {', '.join(tags)} and a copy of the student, {human_bytes(copies * shard)}"


def _away(config: Config, sizes: dict[str, int]) -> Iterator[str]:
    """What has a copy in the host's memory because some phase does without it. Gradients and engines keep none."""
    from rlpost.assemble import phases_of

    phases = phases_of(config)
    away = {
        name: size
        for name, size in sizes.items()
        if size
        and name.endswith((".weights", ".optimizer"))
        and not name.startswith("engine.")
        and not all(name in phase.residents for phase in phases)
    }
    if away:
        parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in away.items())
        yield f"host memory of a rank while they are off the device: {parts}"


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def main(arguments: Sequence[str]) -> int:
    import torch

    from rlpost.config.checks import check_config
    from rlpost.failures import host_bytes

    parser = argparse.ArgumentParser(
        prog="rlpost plan", description="The arithmetic of a step and the bytes of each phase, without loading a model."
    )
    parser.add_argument("overrides", nargs="*", metavar="recipe=NAME group.key=value")
    parser.add_argument("--ranks", type=int, default=1, help="of the job that is planned (default: %(default)s)")
    parser.add_argument("--device-gib", type=float, help="memory of a rank's device (default: of this machine)")
    given = parser.parse_intermixed_args(arguments)
    config = load_config(*split_recipe(given.overrides))
    check_config(config, ranks=given.ranks)
    if given.device_gib is not None:
        device, size = "the device", int(given.device_gib * GIB)
    elif torch.cuda.is_available():
        device, size = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    else:
        share = "" if given.ranks == 1 else f", a {given.ranks}th for each rank"
        device, size = f"memory of this machine{share}", host_bytes() // given.ranks
    plan = make_plan(config, given.ranks, size, device, moves=given.device_gib is not None or torch.cuda.is_available())
    print("\n".join(plan.lines))
    return int(plan.needed > plan.device_bytes)
