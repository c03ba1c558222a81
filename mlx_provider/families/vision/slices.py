"""Runs a tower of mlx-vlm a layer at a time.

MLX computes nothing while a model is called, so the whole call is made first, and the outputs of
its layers are noted. Then these are evaluated one after the other. The graph is that of a plain
call, and so are the results, bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

T = TypeVar("T")
Slices = Generator[tuple[()], None, T]
"""Yields after each layer, and returns what the call made."""


def in_slices(parts: Sequence[Any], call: Callable[[], T]) -> Slices[T]:
    """Run `call`, and evaluate what the layers of `parts` (modules) make one by one.

    Its result is a tree or has attributes. A model that evaluates by itself takes one slice.
    """
    outputs: deque[Any] = deque()
    with _noted(parts, outputs):
        made = call()
    if outputs:
        outputs.pop()  # some models do not use the last layer: the result has it where they do
    while outputs:
        mx.eval(outputs.popleft())
        yield ()
    mx.eval([a for _, a in tree_flatten(getattr(made, "__dict__", made)) if _is_array(a)])
    return made


def _is_array(value: Any) -> bool:
    return isinstance(value, mx.array)


class _Noted:
    """A layer that adds each of its outputs to a list."""

    def __init__(self, layer: nn.Module, outputs: deque[Any]) -> None:
        self._layer = layer
        self._outputs = outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._layer(*args, **kwargs)
        self._outputs.append([a for _, a in tree_flatten(made) if _is_array(a)])
        return made


@contextmanager
def _noted(parts: Sequence[Any], outputs: deque[Any]) -> Iterator[None]:
    """Layers note their outputs inside the block."""
    found = [each for part in parts if isinstance(part, nn.Module) for each in _layers(part)]
    for module, name, layers in found:
        module[name] = [_Noted(layer, outputs) for layer in layers]
    try:
        yield
    finally:
        for module, name, layers in found:
            module[name] = layers


def _layers(module: nn.Module) -> Iterator[tuple[nn.Module, str, list[nn.Module]]]:
    """The lists of modules in a module, but not those within their members."""
    for name, part in module.items():
        if isinstance(part, nn.Module):
            yield from _layers(part)
        elif isinstance(part, list) and part and all(isinstance(p, nn.Module) for p in part):
            yield module, name, part


def towers(model: Any) -> list[Any]:
    """The parts of a model other than its language model."""
    return [part for name, part in model.items() if name != "language_model"]
