"""Attention over rows whose caches stay apart, for models written for one batch cache.

mlx-lm and mlx-vlm models call a module-level `scaled_dot_product_attention(queries, keys,
values, cache, scale, mask, ...)` (mlx_lm/models/base.py 0.32.2, mlx_vlm/models/base.py 0.7.10).
`route` puts a wrapper in its place in the modules of one model: where `keys` is a `Parts`
(several caches, each for a run of rows) every part is attended on its own and the results are
joined; a part may also be the tokens of one row, each of which the model takes for a row. Any
other call goes to the original, or to `cpu_attention` where that is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from . import cpu_attention
from .stand_in import namespaces, stand_in

NAME = "scaled_dot_product_attention"
PARAMETERS = ("scale", "mask", "sinks")
"""Of the original, after the cache."""


class Parts(list[Any]):
    """Keys or values of several caches, in row order; carries the caches and their row counts.

    `turned`: caches of one row, whose tokens stand where others have rows.
    """

    def __init__(
        self, arrays: list[Any], caches: list[Any], sizes: list[int], turned: list[bool]
    ) -> None:
        super().__init__(arrays)
        self.caches = caches
        self.sizes = sizes
        self.turned = turned


def route(model: Any) -> bool:
    """Make the attention of `model`'s modules understand `Parts`. Idempotent.

    Returns whether any module was found to route.
    """
    return stand_in(namespaces(model), NAME, routed)


def routed(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`original`, with `Parts` attended part by part."""

    def together(queries: mx.array, keys: Any, values: Any, cache: Any, **named: Any) -> mx.array:
        if cpu_attention.applies(queries, keys, values, named):
            return cpu_attention.attend(queries, keys, values, **named)
        return original(queries, keys, values, cache, **named)

    @functools.wraps(original)
    def attend(
        queries: mx.array, keys: Any, values: Any, cache: Any = None, *args: Any, **kwargs: Any
    ) -> mx.array:
        named = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        if not isinstance(keys, Parts):
            return together(queries, keys, values, cache, **named)
        mask = named.pop("mask", None)
        out, start = [], 0
        for i, (part, size) in enumerate(zip(keys.caches, keys.sizes, strict=True)):
            turned = keys.turned[i]
            rows = _turned(queries[start : start + size], turned)
            own = mask[i] if isinstance(mask, list) else mask
            found = together(rows, keys[i], values[i], part, **named, mask=own)
            out.append(_turned(found, turned))
            start += size
        return mx.concatenate(out, axis=0)

    return attend


def _turned(x: mx.array, turned: bool) -> mx.array:
    """(tokens, heads, 1, D) as (1, heads, tokens, D), or back."""
    return x.swapaxes(0, 2) if turned else x
