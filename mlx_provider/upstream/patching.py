"""Functions of upstream's modules that ours take the place of, and putting the originals back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import ModuleType
from typing import Any

from ..records import Function


def patch(
    modules: Iterable[ModuleType],
    name: str,
    make: Callable[[Function], Function | None],
    key: Hashable = None,
) -> bool:
    """Put `make(original)` in the place of each function `name` of the modules.

    Where `make` gives `None` the original stays. A patch may lie over another; one of the same
    `key` (unset: `make` itself) is put in once. Returns whether there is any patch of it.
    """
    key = make if key is None else key
    patched = False
    for module in [each for each in modules if callable(getattr(each, name, None))]:
        original = getattr(module, name)
        if any(layer.patch == key for layer in _patches(original)):
            patched = True
            continue
        ours: Any = make(original)
        if ours is not None:
            ours.original, ours.patch = original, key
            setattr(module, name, ours)
            patched = True
    return patched


def unpatch(modules: Iterable[ModuleType], key: Hashable) -> None:
    """Take the patches of that key out again, but for those that another one lies over."""
    for module in modules:
        for name, function in list(vars(module).items()):
            if next((layer.patch == key for layer in _patches(function)), False):
                setattr(module, name, function.original)


def _patches(function: Any) -> Iterator[Any]:
    """The patched forms of a function, the outermost first."""
    while hasattr(function, "patch") and hasattr(function, "original"):
        yield function
        function = function.original


class Unpatched:
    """While entered, `model`'s modules have their own functions: upstream as it comes."""

    def __init__(self, model: Any) -> None:
        self._ours = [
            (module, name, layers)
            for module in namespaces(model)
            for name, function in vars(module).items()
            if (layers := [*_patches(function)])
        ]

    def __enter__(self) -> None:
        for module, name, layers in self._ours:
            setattr(module, name, layers[-1].original)

    def __exit__(self, *error: object) -> None:
        for module, name, layers in self._ours:
            setattr(module, name, layers[0])


def namespaces(model: Any) -> list[ModuleType]:
    """The Python modules that the classes of `model`'s layers are defined in."""
    names = {type(layer).__module__ for layer in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]
