"""Functions of upstream's modules that ours stand in for, and putting the originals back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


def stand_in(
    modules: Iterable[ModuleType], name: str, make: Callable[[Function], Function | None]
) -> bool:
    """Put `make(original)` in the place of each function `name` of the modules.

    Where `make` gives `None` the original stays. Idempotent. Returns whether there was any.
    """
    found = [module for module in modules if callable(getattr(module, name, None))]
    for module in found:
        original = getattr(module, name)
        ours = None if hasattr(original, "pristine") else make(original)
        if ours is not None:
            ours.pristine = original  # type: ignore[attr-defined]
            setattr(module, name, ours)
    return bool(found)


class Pristine:
    """While entered, `model`'s modules have their own functions: upstream as it comes."""

    def __init__(self, model: Any) -> None:
        self._ours = [
            (module, name, function)
            for module in namespaces(model)
            for name, function in vars(module).items()
            if hasattr(function, "pristine")
        ]

    def __enter__(self) -> None:
        for module, name, function in self._ours:
            setattr(module, name, function.pristine)

    def __exit__(self, *error: object) -> None:
        for module, name, function in self._ours:
            setattr(module, name, function)


def namespaces(model: Any) -> list[ModuleType]:
    """The Python modules that the classes of `model`'s layers are defined in."""
    names = {type(layer).__module__ for layer in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]
