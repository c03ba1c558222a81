"""Attention over rows whose caches stay apart, for models written for one batch cache.

mlx-lm and mlx-vlm models call a module-level `scaled_dot_product_attention(queries, keys,
values, cache, scale, mask, ...)` (mlx_lm/models/base.py 0.32.2, mlx_vlm/models/base.py 0.7.10).
`route` puts a wrapper in its place in the modules of one model: where `keys` is a `Parts`
(several caches, each for a run of rows) every part is attended on its own and the results are
joined; a part may also be the tokens of one row, each of which the model takes for a row. Each
call goes to the original, part by part, or to `cpu_attention`, all parts at once, where that is
faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from . import cpu_attention
from .cpu_attention import Part
from .stand_in import namespaces, stand_in

NAME = "scaled_dot_product_attention"
PARAMETERS = ("scale", "mask", "sinks")
"""Of the original, after the cache."""


@dataclass(frozen=True)
class Run:
    """Rows of one cache among all rows of a call."""

    cache: Any
    rows: slice
    turned: bool = False
    """They are one row's tokens, which stand where others have rows."""


class Parts(list[Any]):
    """Keys or values of several caches, in row order, and whose they are."""

    def __init__(self, arrays: list[Any], runs: list[Run]) -> None:
        super().__init__(arrays)
        self.runs = runs


def route(model: Any) -> bool:
    """Make the attention of `model`'s modules understand `Parts`. Idempotent.

    Returns whether any module was found to route.
    """
    return stand_in(namespaces(model), NAME, routed)


def routed(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`original`, with `Parts` attended part by part."""

    @functools.wraps(original)
    def attend(
        queries: mx.array, keys: Any, values: Any, cache: Any = None, *args: Any, **kwargs: Any
    ) -> mx.array:
        named = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        mask = named.pop("mask", None)
        several = isinstance(keys, Parts)
        parts = _parts(keys, values, mask) if several else [Part(keys, values, mask)]
        if cpu_attention.applies(queries, parts, named):
            return cpu_attention.attend(queries, parts, **named)
        if not several:
            return original(queries, keys, values, cache, **named, mask=mask)
        out = []
        for part, run in zip(parts, keys.runs, strict=True):
            own = part.of(queries), part.keys, part.values, run.cache
            found = original(*own, **named, mask=part.mask)
            out.append(found.swapaxes(0, 2) if run.turned else found)
        return mx.concatenate(out, axis=0)

    return attend


def _parts(keys: Parts, values: Parts, mask: Any) -> list[Part]:
    """What each run of rows attends to; `mask`: one for each, or one for all."""
    masks = mask if isinstance(mask, list) else [mask] * len(keys)
    return [
        Part(k, v, own, run.rows, run.turned)
        for k, v, own, run in zip(keys, values, masks, keys.runs, strict=True)
    ]
