"""Hugging Face ↔ Megatron: one table of names, read in both directions.

A Megatron parameter is made of one or more Hugging Face tensors (its parts). Tensor parallelism cuts every part
along the same dimension, and a rank's shard is the join of its slices. So the whole tensor is the case of one
rank, and the gate-over-up layout needs no rule of its own: each half is sliced before they are stacked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Join = Literal["same", "stack", "qkv", "heads", "vocabulary"]


@dataclass(frozen=True)
class Rule:
    """How one Megatron parameter is made. In names `{i}` is the number of the layer, counted over all stages, and `{e}`
    that of the expert, counted over all expert-parallel ranks."""

    megatron: str
    parts: tuple[str, ...]  # Hugging Face names, in the order in which they are joined
    cut: int | None = None  # the dimension that tensor parallelism cuts; None: every rank holds it whole
    join: Join = "same"


_LAYER, _HF_LAYER = "decoder.layers.{i}.", "model.layers.{i}."
_ATTENTION, _HF_ATTENTION = _LAYER + "self_attention.", _HF_LAYER + "self_attn."
_QKV = ("q_proj", "k_proj", "v_proj")
_HF_EXPERT = _HF_LAYER + "mlp.experts.{e}."
_INPUT_NORM, _MLP_NORM = _HF_LAYER + "input_layernorm.weight", _HF_LAYER + "post_attention_layernorm.weight"

RULES: tuple[Rule, ...] = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), 0, "vocabulary"),
    Rule("output_layer.weight", ("lm_head.weight",), 0, "vocabulary"),
    # A critic's, under the names of Transformers' classifiers of tokens and sequences.
    Rule("value_head.weight", ("score.weight",)),
    Rule("value_head.bias", ("score.bias",)),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule(_LAYER + "input_layernorm.weight", (_INPUT_NORM,)),
    Rule(_LAYER + "pre_mlp_layernorm.weight", (_MLP_NORM,)),
    # Transformer Engine keeps the norm inside the linear layer that follows it.
    Rule(_ATTENTION + "linear_qkv.layer_norm_weight", (_INPUT_NORM,)),
    Rule(_LAYER + "mlp.linear_fc1.layer_norm_weight", (_MLP_NORM,)),
    Rule(_ATTENTION + "linear_qkv.weight", tuple(f"{_HF_ATTENTION}{p}.weight" for p in _QKV), 0, "qkv"),
    Rule(_ATTENTION + "linear_qkv.bias", tuple(f"{_HF_ATTENTION}{p}.bias" for p in _QKV), 0, "qkv"),
    Rule(_ATTENTION + "q_layernorm.weight", (_HF_ATTENTION + "q_norm.weight",)),
    Rule(_ATTENTION + "k_layernorm.weight", (_HF_ATTENTION + "k_norm.weight",)),
    Rule(_ATTENTION + "linear_proj.weight", (_HF_ATTENTION + "o_proj.weight",), 1, "heads"),
    Rule(
        _LAYER + "mlp.linear_fc1.weight",
        (_HF_LAYER + "mlp.gate_proj.weight", _HF_LAYER + "mlp.up_proj.weight"),
        0,
        "stack",
    ),
    Rule(_LAYER + "mlp.linear_fc2.weight", (_HF_LAYER + "mlp.down_proj.weight",), 1),
    Rule(_LAYER + "mlp.router.weight", (_HF_LAYER + "mlp.gate.weight",)),
    Rule(
        _LAYER + "mlp.experts.{e}.linear_fc1.weight",
        (_HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight"),
        0,
        "stack",
    ),
    Rule(_LAYER + "mlp.experts.{e}.linear_fc2.weight", (_HF_EXPERT + "down_proj.weight",), 1),
)
_BY_NAME = {rule.megatron: rule for rule in RULES}
# Mixtral's own words for the parts of its experts, in the place of those of Qwen3-MoE.
MIXTRAL_NAMES = (
    (".mlp.", ".block_sparse_moe."),
    (".gate_proj.", ".w1."),
    (".down_proj.", ".w2."),
    (".up_proj.", ".w3."),
)
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def is_expert(name: str) -> bool:
    """Whether a Megatron parameter belongs to one expert, and so lies on one expert-parallel rank."""
    return _EXPERT.search(name) is not None


def shift_expert(name: str, by: int) -> str:
    """The same parameter of another expert."""
    return _EXPERT.sub(lambda number: str(int(number.group()) + by), name)


def padded_vocabulary(vocab_size: int, tp_size: int) -> int:
    """Rows of the embedding and of the head: a multiple of the tensor-parallel size."""
    return -(-vocab_size // tp_size) * tp_size


def padded_groups(query_groups: int, tp_size: int) -> int:
    """Key/value heads with their query heads: a multiple of the tensor-parallel size.

    Those that are added are zero in every weight, so they give nothing and their gradient is exactly zero: SmolLM2's
    three key/value heads run on two ranks.
    """
    return -(-query_groups // tp_size) * tp_size


@dataclass(frozen=True)
class HFMap:
    """The table for one model.

    Args:
        query_groups: key/value heads of the whole model; Megatron's has more where they are padded.
        heads_per_group: query heads that share one key/value head.
        vocab_size: rows of the Hugging Face embedding; Megatron's has more where it is padded.
        tied: the head is the embedding, and is not a tensor of its own on disk.
        renames: (part of a name, what this model has in its place on disk).
    """

    query_groups: int
    heads_per_group: int
    vocab_size: int
    tied: bool
    renames: tuple[tuple[str, str], ...] = ()

    def rule(self, name: str) -> tuple[Rule, tuple[str, ...]]:
        """The rule of a Megatron parameter and the Hugging Face names of its parts."""
        layer = re.search(r"\.layers\.(\d+)\.", name)
        expert = _EXPERT.search(name)
        pattern = _EXPERT.sub("{e}", name)
        pattern = pattern if layer is None else pattern.replace(layer.group(0), ".layers.{i}.", 1)
        rule = _BY_NAME.get(pattern)
        if rule is None:
            raise KeyError(f"no rule maps the Megatron parameter {name} to Hugging Face names")
        parts = rule.parts if layer is None else tuple(p.replace("{i}", layer.group(1)) for p in rule.parts)
        if expert is not None:
            parts = tuple(p.replace("{e}", expert.group()) for p in parts)
        for ours, theirs in self.renames:
            parts = tuple(p.replace(ours, theirs) for p in parts)
        if self.tied and name == "output_layer.weight":
            parts = ("model.embed_tokens.weight",)
        return rule, parts

    def on_disk(self, name: str) -> bool:
        """Whether a parameter has tensors of its own: a tied head is the embedding."""
        return not (self.tied and name == "output_layer.weight")

    def from_hf(self, name: str, get: Callable[[str], Tensor], tp_rank: int = 0, tp_size: int = 1) -> Tensor:
        """A rank's shard of a Megatron parameter; the whole tensor with `tp_size` 1.

        `get` returns a Hugging Face tensor; with a memory-mapped one only the rank's slice is read.
        """
        rule, names = self.rule(name)
        parts = [get(part) for part in names]
        if rule.join == "vocabulary":
            return _vocabulary_rows(parts[0], self.vocab_size, tp_rank, tp_size)
        if rule.join in ("qkv", "heads"):
            parts = [self._groups_of(part, rule.cut, tp_rank, tp_size) for part in parts]
        elif rule.cut is not None:
            parts = [_slice(part, rule.cut, tp_rank, tp_size, of) for part, of in zip(parts, names)]
        if rule.join == "qkv":
            return _interleave(parts, padded_groups(self.query_groups, tp_size) // tp_size)
        return torch.cat(parts) if rule.join == "stack" else parts[0]

    def to_hf(self, name: str, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """The Hugging Face tensors of a Megatron parameter, whole, from the shards of all tensor-parallel ranks in
        rank order (one shard is enough for a parameter that is not cut).

        A tied head gives nothing: the embedding is sent under its own name.
        """
        rule, names = self.rule(name)
        if not self.on_disk(name):
            return []
        if rule.cut is None:
            shards = shards[:1]
        if rule.join == "vocabulary":
            whole = shards[0] if len(shards) == 1 else torch.cat(list(shards))
            return [(names[0], whole[: self.vocab_size])]
        if rule.join == "qkv":
            groups = padded_groups(self.query_groups, len(shards)) // len(shards)
            pieces = [_deinterleave(shard, groups, self.heads_per_group) for shard in shards]
        elif rule.join == "stack":
            pieces = [shard.chunk(len(names)) for shard in shards]
        else:
            pieces = [(shard,) for shard in shards]
        if len(shards) == 1:
            return list(zip(names, pieces[0]))
        whole = [torch.cat([piece[n] for piece in pieces], dim=rule.cut) for n in range(len(names))]
        if rule.join in ("qkv", "heads"):
            padded = padded_groups(self.query_groups, len(shards))
            whole = [w.narrow(rule.cut, 0, w.shape[rule.cut] // padded * self.query_groups) for w in whole]
        return list(zip(names, whole))

    def _groups_of(self, part: Tensor, dim: int, tp_rank: int, tp_size: int) -> Tensor:
        """A rank's query groups of q, k, v or o, with zeros in the place of those that are added."""
        size, groups = part.shape[dim] // self.query_groups, padded_groups(self.query_groups, tp_size) // tp_size
        first, last = (min(rank * groups, self.query_groups) for rank in (tp_rank, tp_rank + 1))
        mine = part.narrow(dim, first * size, (last - first) * size)
        if last - first == groups:
            return mine
        shape = list(mine.shape)
        shape[dim] = (groups - (last - first)) * size
        return torch.cat([mine, mine.new_zeros(shape)], dim=dim)


def _slice(part: Tensor, dim: int, tp_rank: int, tp_size: int, name: str) -> Tensor:
    if part.shape[dim] % tp_size:
        raise ValueError(f"{name}: dimension {dim} is {part.shape[dim]}, not a multiple of parallel.tensor={tp_size}")
    size = part.shape[dim] // tp_size
    return part.narrow(dim, tp_rank * size, size)


def _vocabulary_rows(table_VH: Tensor, vocab_size: int, tp_rank: int, tp_size: int) -> Tensor:
    rows = padded_vocabulary(vocab_size, tp_size) // tp_size
    mine = table_VH[tp_rank * rows : (tp_rank + 1) * rows]
    missing = rows - mine.shape[0]
    return mine if missing == 0 else torch.cat([mine, mine.new_zeros(missing, *mine.shape[1:])])


def _interleave(parts: Sequence[Tensor], groups: int) -> Tensor:
    """q, k and v by query group: [q … q k v] for each key/value head."""
    grouped = [part.reshape(groups, part.shape[0] // groups, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _deinterleave(qkv: Tensor, groups: int, heads_per_group: int) -> tuple[Tensor, ...]:
    head_dim = qkv.shape[0] // (groups * (heads_per_group + 2))
    grouped = qkv.reshape(groups, (heads_per_group + 2) * head_dim, *qkv.shape[1:])
    parts = grouped.split([heads_per_group * head_dim, head_dim, head_dim], dim=1)
    return tuple(part.flatten(0, 1) for part in parts)
