"""Plain greedy decoding with a `LoadedModel`, the reference for any engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_provider.records import Features, LoadedModel, Prompt
from mlx_provider.testing.driver import prefill


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
    logits, cache = prefill(model, prompt, chunk=chunk, features=features)
    return Started(prompt, cache, logits, len(prompt.tokens))


def continue_greedily(
    model: LoadedModel, rows: Sequence[Started], cache: list[Any], count: int
) -> list[list[int]]:
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
