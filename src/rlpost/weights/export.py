"""Writes a Hugging Face directory that Transformers loads: streamed safetensors, config, tokenizer, model card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlpost.parallel import all_gather_objects, rank
from rlpost.weights.checkpoint import versions
from rlpost.weights.shards import Shard, ShardWriter, assign_shards, sync_directory, write_durably

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG = "config.json"
CURVE_ROWS = 12  # of the reward curve in the card; the ends are always there


class ExportError(RuntimeError):
    """An export that could not be written; the same on every rank."""


def save_pretrained(
    directory: str | Path,
    hf_tensors: Iterable[tuple[str, Tensor]],
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    *,
    card: Mapping[str, Any],
    shard_bytes: int = 5 * 10**9,
) -> Path:
    """Write the weights as a Hugging Face model directory. Collective: every rank reads `hf_tensors` to its end, rank 0
    writes, one tensor alive at a time.

    hf_tensors: (Hugging Face name, whole tensor), a tied head at most once. source: the model's directory, for its
    config.json and generation_config.json. dtype: of the written floating tensors. card: what README.md tells
    (`model_card`). The directory appears complete or not at all and replaces an older export; raises ExportError on all
    ranks where it cannot be written or `directory` holds something else.
    """
    final = Path(directory)
    beside = final.with_name(final.name + ".tmp")
    writing = rank() == 0
    error: Exception | None = None
    if writing:
        try:
            _prepare(final, beside)
            _write_companions(beside, Path(source), tokenizer, dtype, card)
        except (OSError, ValueError) as failure:
            error = failure
    _agree(error, final, beside)
    cast = ((name, t.to(dtype) if t.is_floating_point() else t) for name, t in hf_tensors)
    writer, shards = ShardWriter(beside), []
    for shard, tensor in assign_shards("model", cast, shard_bytes):
        if not shards or shards[-1] is not shard:
            shards.append(shard)
        if writing:
            writer.put(shard, tensor)
    writer.close()
    error = writer.error
    if writing and error is None:
        try:
            _finish(beside, final, shards)
        except OSError as failure:
            error = failure
    _agree(error, final, beside)
    return final


def _prepare(final: Path, beside: Path) -> None:
    if final.exists() and not (final / CONFIG).is_file() and any(final.iterdir()):
        raise ValueError(f"{final} is not empty and no export; choose another directory")
    final.parent.mkdir(parents=True, exist_ok=True)
    if beside.exists():
        shutil.rmtree(beside)
    beside.mkdir()


def _write_companions(
    beside: Path, source: Path, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, card: Mapping[str, Any]
) -> None:
    config = json.loads((source / CONFIG).read_text())
    config.pop("torch_dtype", None)  # its name before Transformers 4.56
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_durably(beside / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    if (source / "generation_config.json").is_file():
        shutil.copy(source / "generation_config.json", beside)
    tokenizer.save_pretrained(beside)
    write_durably(beside / "README.md", model_card(card, base_model=source.name).encode())


def _finish(beside: Path, final: Path, shards: Sequence[Shard]) -> None:
    """Give the files the names that are known only now, and put the directory in its place."""
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {tensor: name for name, shard in zip(names, shards) for tensor in shard.entries}
        index = {"metadata": {"total_size": sum(s.data_bytes for s in shards)}, "weight_map": weight_map}
        write_durably(beside / "model.safetensors.index.json", (json.dumps(index, indent=2) + "\n").encode())
    for name, shard in zip(names, shards):
        os.rename(beside / shard.name, beside / name)
    sync_directory(beside)
    older = final.with_name(final.name + ".old")
    if older.exists():
        shutil.rmtree(older)
    if final.exists():
        os.rename(final, older)
    os.rename(beside, final)
    sync_directory(final.parent)
    if older.exists():
        shutil.rmtree(older)


def model_card(card: Mapping[str, Any], *, base_model: str) -> str:
    """README.md of an export. Of `card`: "curve" is [(step, value), …] of the training reward, "metrics" a dict of the
    last numbers, "configuration" YAML, "versions" defaults to those installed; every other entry becomes a line of the
    table."""
    card = {"base_model": base_model, **card}
    facts = [
        (key, value) for key, value in card.items() if key not in ("curve", "metrics", "configuration", "versions")
    ]
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"base_model: {json.dumps(str(card['base_model']))}",
        "tags: [rlpost, reinforcement-learning]",
        "---",
        "",
        f"# {card.get('recipe', base_model)}",
        "",
        f"`{card['base_model']}`, post-trained with rlpost.",
        "",
        *_table(("", ""), [(key.replace("_", " "), _plain(value)) for key, value in facts]),
    ]
    if card.get("curve"):
        lines += ["", "## Training reward", "", *_table(("step", "reward"), _thin(card["curve"]))]
    if card.get("metrics"):
        lines += ["", "## Last metrics", "", *_table(("metric", "value"), sorted(card["metrics"].items()))]
    if card.get("configuration"):
        lines += ["", "## Configuration", "", "```yaml", card["configuration"].rstrip(), "```"]
    lines += ["", "## Versions", "", *_table(("package", "version"), card.get("versions", versions()).items())]
    return "\n".join(lines) + "\n"


def _thin(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    last = len(curve) - 1
    if last < CURVE_ROWS:
        return list(curve)
    return [curve[round(i * last / (CURVE_ROWS - 1))] for i in range(CURVE_ROWS)]


def _table(head: tuple[str, str], rows: Iterable[tuple[Any, Any]]) -> list[str]:
    return [f"| {head[0]} | {head[1]} |", "| --- | --- |", *(f"| {_cell(a)} | {_cell(b)} |" for a, b in rows)]


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _agree(error: Exception | None, target: Path, beside: Path) -> None:
    if error is not None:
        shutil.rmtree(beside, ignore_errors=True)  # the next export sweeps up what cannot go now
    errors = [message for message in all_gather_objects(None if error is None else str(error)) if message is not None]
    if errors:
        raise ExportError(f"export to {target}: {errors[0]}") from error
