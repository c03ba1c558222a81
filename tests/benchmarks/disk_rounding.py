"""What fewer bits on disk change in the log-probabilities of the tokens that follow."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlx_provider.demo
from from_disk import restored
from mlx_provider import LoadOptions
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.disk import DiskTier
from mlx_provider.engine.prefix_cache.key import CacheKey
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.records import PrefillChunk, Prompt
from mlx_provider.testing.driver import Calls

TEXT = Path(__file__).parents[2] / "CONTRIBUTING.md"
HEAD, TAIL = 512, 256
"""Tokens that come from disk, and tokens that follow."""
KEY = CacheKey("rounding")


@dataclass(frozen=True)
class Rounded:
    """The demo model after a prefix from disk, beside the same with all bits."""

    model: str
    bits: int
    mean_difference: float
    """Of the log-probability of each token that follows."""
    largest_difference: float
    same_top: float
    """Share of the places with the same most likely token."""


def run() -> list[Rounded]:
    """Both demo models, with 8 and 4 bits."""
    found = []
    for name in ("model", "hybrid"):
        model = load_text(Path(mlx_provider.demo.__path__[0]) / name, LoadOptions())
        ids = model.tokenizer.encode(TEXT.read_text(encoding="utf-8"), special=False)
        head, tail = list(ids[:HEAD]), list(ids[HEAD : HEAD + TAIL])
        row = model.make_cache()
        mx.eval(model.prefill(PrefillChunk(Prompt(head), 0, HEAD, row)))
        exact = _following(model, _from_disk(model, row, head, tail[0], None), tail)
        for bits in (8, 4):
            near = _following(model, _from_disk(model, row, head, tail[0], bits), tail)
            places = mx.arange(TAIL - 1), mx.array(tail[1:])
            away = mx.abs(near[places] - exact[places])
            same = mx.argmax(near, -1) == mx.argmax(exact, -1)
            told = (round(each.item(), 3) for each in (mx.mean(away), mx.max(away), mx.mean(same)))
            found.append(Rounded(name, bits, *told))
    return found


def _from_disk(
    model: TextModel, row: list[Any], head: list[int], after: int, bits: int | None
) -> list[Any]:
    calls = Calls()
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskTier(Path(folder), 2**30, calls, bits=bits)
        cache = PrefixCache(budget=lambda: 0, disk=disk)
        state = cache.snapshot(row)
        cache.insert(KEY, head, row, {} if state is None else {HEAD: state})
        again, length = restored(cache, calls, model, KEY, [*head, after])
        cache.close()
    if length != HEAD:
        raise RuntimeError(f"{length} of {HEAD} tokens came from disk")
    return again


def _following(model: TextModel, row: list[Any], tail: list[int]) -> mx.array:
    """Log-probabilities (tokens, vocab) after each token but the last."""
    logits = model.model(mx.array([tail[:-1]]), cache=row)[0].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
