"""Recipes for large models, with the tiny ones of the tests."""

from __future__ import annotations

from rlpost.config.compose import load_config

TOP_K = {"sdpo": "algorithm.top_k=8", "opd": "algorithm.top_k=8", "blend": "algorithm.sdpo.top_k=8"}


def small_top_k(name: str) -> list[str]:
    """Overrides of this recipe: the tiny model has fewer ids than its K."""
    algorithm = load_config(name).algorithm["name"]
    return [TOP_K[algorithm]] if algorithm in TOP_K else []
