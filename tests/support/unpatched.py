"""Upstream's own functions in place of patched ones."""

from typing import Any

from mlx_provider.upstream.patching import namespaces


def original_of(function: Any) -> Any:
    while hasattr(function, "patch") and hasattr(function, "original"):
        function = function.original
    return function


class Unpatched:
    """A context in which the modules of `model` have upstream's original functions."""

    def __init__(self, model: Any) -> None:
        self._ours = [
            (module, name, function)
            for module in namespaces(model)
            for name, function in vars(module).items()
            if original_of(function) is not function
        ]

    def __enter__(self) -> None:
        for module, name, function in self._ours:
            setattr(module, name, original_of(function))

    def __exit__(self, *error: object) -> None:
        for module, name, function in self._ours:
            setattr(module, name, function)
