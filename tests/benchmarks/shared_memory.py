"""The memory of an engine's rows with one long prompt, and the bytes that they copy at its hit."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_provider import LoadOptions
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.testing.driver import new_engine, new_request
from shared_prefix import made_cache
from tiny import build
from turns import counted

ROWS = 8
TAIL = 128
"""Tokens of each prompt behind what is common."""
REPLY = 256
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Held:
    """All as multiples of the KV of one row that has the prompt alone."""

    bits: int | None
    """Of keys and values."""
    prefix: int
    rows: float
    """Memory of 8 requests behind one prefix."""
    choices: float
    """Memory of one request with `n` of 8."""
    divided: float
    """Bytes copied for the second request, which divides the buffers of the first."""
    hit: float
    """Bytes copied for one of the others."""


def run(prefix: int, bits: int | None) -> Held:
    with tempfile.TemporaryDirectory() as folder:
        model = load_text(build(Path(folder) / "qwen3", "qwen3", **SIZES), LoadOptions())
    before = _active()
    engine, one = _engine(model, bits), _prompt(prefix, 0)
    _decode(engine, new_request(one, max_tokens=REPLY))
    alone = _active() - before
    copied = []
    for i in range(1, ROWS):
        with counted() as copies:
            _decode(engine, new_request(_prompt(prefix, i), max_tokens=REPLY))
        copied.append(copies.nbytes)
    rows = _active() - before
    del engine
    before = _active()
    engine = _engine(model, bits)
    _decode(engine, new_request(one, max_tokens=REPLY, n=ROWS))
    choices = _active() - before
    return Held(
        bits, prefix, rows / alone, choices / alone, copied[0] / alone, max(copied[1:]) / alone
    )


def _engine(model: TextModel, bits: int | None) -> Engine:
    return new_engine(
        model, max_chunk=512, reserve=REPLY, least=256, make_cache=partial(made_cache, model, bits),
        prefix_cache=PrefixCache(budget=lambda: 2**30),
    )  # fmt: skip


def _prompt(prefix: int, which: int) -> list[int]:
    common = [20 + i * i % 300 for i in range(prefix)]
    return [*common, *(40 + (which * 31 + i) % 200 for i in range(TAIL))]


def _decode(engine: Engine, request: Request) -> None:
    """Submit a request and run until all of its rows decode."""
    engine.submit(request)
    while min(len(row.tokens) for row in request.rows) < 2:
        engine.step()


def _active() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()
