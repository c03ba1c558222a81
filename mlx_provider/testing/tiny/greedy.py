"""Plain greedy decoding with a `LoadedModel`: the reference for any engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...records import Features, LoadedModel, PrefillChunk, Prompt

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass
class Started:
    prompt: Prompt
    cache: list[Any]
    logits: mx.array
    """(vocab,) after the last token."""
    length: int

    @property
    def position(self) -> int:
        """Rotary position of the next token."""
        return self.length + self.prompt.rope_delta


def features_of(model: LoadedModel, prompt: Prompt) -> dict[str, Features]:
    return {span.content_hash: model.embed(span) for span in prompt.spans}


def start(
    model: LoadedModel,
    prompt: Prompt,
    *,
    chunk: int = 0,
    features: Mapping[str, Features] | None = None,
) -> Started:
    """Prefill one row, in chunks of `chunk` tokens (0: at once)."""
    import mlx.core as mx

    known = features_of(model, prompt) if features is None else features
    cache, length = model.make_cache(), len(prompt.tokens)
    logits = mx.zeros(())
    for at in range(0, length, chunk or length):
        stop = min(at + (chunk or length), length)
        logits = model.prefill(PrefillChunk(prompt, at, stop, cache, known))
        mx.eval(logits)
    return Started(prompt, cache, logits, length)


def continue_greedily(
    model: LoadedModel, rows: Sequence[Started], cache: list[Any], count: int
) -> list[list[int]]:
    import mlx.core as mx

    logits = mx.stack([row.logits for row in rows])
    out: list[list[int]] = [[] for _ in rows]
    for _ in range(count):
        tokens = mx.argmax(logits, axis=-1)
        for own, token in zip(out, np.array(tokens).tolist(), strict=True):
            own.append(int(token))
        positions = mx.array([row.position for row in rows], dtype=mx.int32)
        logits = model.decode(tokens.astype(mx.int32), cache, positions)
        mx.eval(logits)
        for row in rows:
            row.length += 1
    for row, last in zip(rows, logits, strict=True):
        row.logits = last
    return out


def greedy(model: LoadedModel, prompt: Prompt, count: int, *, chunk: int = 0) -> list[int]:
    row = start(model, prompt, chunk=chunk)
    return continue_greedily(model, [row], row.cache, count)[0]
