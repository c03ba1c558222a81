"""Replaces functions of upstream's modules, and restores the originals."""

import functools
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import ModuleType
from typing import Any

from ..records import Function


def patch(
    owners: Iterable[Any],
    name: str,
    make: Callable[[Function], Function | None],
    key: Hashable = None,
) -> bool:
    """Replace each function `name` of the modules or classes by `make(original)`, unless that is
    `None`. A function can have several patches, but only one with the same `key` (default: `make`
    itself). Returns whether a function has a patch with `key`."""
    key = make if key is None else key
    patched = False
    for owner in [owner for owner in owners if callable(getattr(owner, name, None))]:
        original = getattr(owner, name)
        if any(layer.patch == key for layer in _patches(original)):
            patched = True
            continue
        ours: Any = make(original)
        if ours is not None:
            ours.original, ours.patch = original, key
            setattr(owner, name, ours)
            patched = True
    return patched


def unpatch(owners: Iterable[Any], key: Hashable) -> None:
    """Remove the patches with that key, except where a later patch wraps them."""
    for owner in owners:
        for name, function in list(vars(owner).items()):
            if next((layer.patch == key for layer in _patches(function)), False):
                setattr(owner, name, function.original)


def _patches(function: Any) -> Iterator[Any]:
    while hasattr(function, "patch") and hasattr(function, "original"):
        yield function
        function = function.original


def namespaces(model: Any) -> list[ModuleType]:
    """The Python modules that define the classes of a model's layers."""
    names = {type(layer).__module__ for layer in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


STEP = 32


def patch_ssm_step_size() -> None:
    """Let mlx-lm's state space rule (`ssm_attn`, mlx_lm/models/ssm.py 0.32.2) compute `STEP` tokens
    at a time, not 256: a pass that ends within them rounds differently, and chunks of prompts end
    at multiples of `STEP`. Idempotent."""
    module = sys.modules.get("mlx_lm.models.ssm")
    if module is not None:
        patch([module], "ssm_attn", _with_step)


def _with_step(original: Function) -> Function:
    @functools.wraps(original)
    def with_step(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs | {"step": STEP})

    return with_step
