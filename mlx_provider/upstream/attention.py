"""Attention over rows whose caches stay apart, for models written for one batch cache.

mlx-lm and mlx-vlm models call a module-level `scaled_dot_product_attention(queries, keys,
values, cache, scale, mask, ...)` (mlx_lm/models/base.py 0.32.2, mlx_vlm/models/base.py 0.7.10).
`route` puts a wrapper in its place in the modules of one model: where `keys` is a `Parts`
(several caches, each for a run of rows) every part is attended on its own and the results are
joined; any other call goes to the original, or to `cpu_attention` where that is faster.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from . import cpu_attention

NAME = "scaled_dot_product_attention"
PARAMETERS = ("scale", "mask", "sinks")
"""Of the original, after the cache."""


class Parts(list[Any]):
    """Keys or values of several caches, in row order; carries the caches and their row counts."""

    def __init__(self, arrays: list[Any], caches: list[Any], sizes: list[int]) -> None:
        super().__init__(arrays)
        self.caches = caches
        self.sizes = sizes


def route(model: Any) -> bool:
    """Make the attention of `model`'s modules understand `Parts`. Idempotent.

    Returns whether any module was found to route.
    """
    modules = _attention_modules(model)
    for module in modules:
        original = getattr(module, NAME)
        if not hasattr(original, "pristine"):
            setattr(module, NAME, routed(original))
    return bool(modules)


class Unrouted:
    """While entered, `model`'s modules have their pristine functions: upstream as it comes."""

    def __init__(self, model: Any) -> None:
        self._modules = _attention_modules(model)
        self._kept: list[Any] = []

    def __enter__(self) -> None:
        self._kept = [getattr(module, NAME) for module in self._modules]
        for module, function in zip(self._modules, self._kept, strict=True):
            setattr(module, NAME, getattr(function, "pristine", function))

    def __exit__(self, *error: object) -> None:
        for module, function in zip(self._modules, self._kept, strict=True):
            setattr(module, NAME, function)


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
            rows = queries[start : start + size]
            own = mask[i] if isinstance(mask, list) else mask
            out.append(together(rows, keys[i], values[i], part, **named, mask=own))
            start += size
        return mx.concatenate(out, axis=0)

    attend.pristine = original  # type: ignore[attr-defined]
    return attend


def _attention_modules(model: Any) -> list[ModuleType]:
    names = {type(module).__module__ for module in model.modules()}
    found = (sys.modules[name] for name in sorted(names) if name in sys.modules)
    return [m for m in found if callable(getattr(m, NAME, None))]
