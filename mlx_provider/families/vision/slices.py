"""Runs a tower of mlx-vlm a layer at a time.

MLX computes nothing while a model is called: the outputs of its layers are noted during the whole
call, and then evaluated one after the other. The graph and the results are those of a plain call,
bit for bit. A layer with NumPy kernels computes at once; it ends the call, and the next slice calls
the model again with the noted outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

AT_ONCE = 0.02
"""Seconds: a layer whose call takes longer has computed its output, not only described it."""
T = TypeVar("T")
Slices = Generator[tuple[()], None, T]
"""Yields after each layer, and returns what the call made."""


def in_slices(parts: Sequence[Any], call: Callable[[], T]) -> Slices[T]:
    """Run `call`, whose result is a tree or has attributes, and evaluate the layers of `parts`
    (modules) one by one."""
    outputs: list[Any] = []
    made: list[T] = []
    while not made:
        with _noted(parts, _Run(outputs)):
            made.append(call())
        if not made:
            yield ()
    if outputs:
        outputs.pop()  # some models do not use the last layer: the result has it where they do
    while outputs:
        mx.eval(_arrays(outputs.pop(0)))
        yield ()
    (result,) = made
    mx.eval(_arrays(getattr(result, "__dict__", result)))
    return result


def _arrays(tree: Any) -> list[mx.array]:
    return [each for _, each in tree_flatten(tree) if isinstance(each, mx.array)]


class _Computed(BaseException):
    """A layer has computed while it was called."""


@dataclass
class _Run:
    outputs: list[Any]
    """Outputs of the layers so far, in the order of their calls."""
    called: int = 0

    def output(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Raises `_Computed`."""
        at, self.called = self.called, self.called + 1
        if at < len(self.outputs):
            return self.outputs[at]
        began = time.perf_counter()
        self.outputs.append(layer(*args, **kwargs))
        if time.perf_counter() - began > AT_ONCE:
            raise _Computed
        return self.outputs[at]


class _Noted:
    def __init__(self, layer: nn.Module, run: _Run) -> None:
        self._layer = layer
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.output(self._layer, *args, **kwargs)


@contextmanager
def _noted(parts: Sequence[Any], run: _Run) -> Iterator[None]:
    """Layers note their outputs inside the block, which a layer may end."""
    found = [each for part in parts if isinstance(part, nn.Module) for each in _layers(part)]
    for module, name, layers in found:
        module[name] = [_Noted(layer, run) for layer in layers]
    try:
        yield
    except _Computed:
        pass
    finally:
        for module, name, layers in found:
            module[name] = layers


def _layers(module: nn.Module) -> Iterator[tuple[nn.Module, str, list[nn.Module]]]:
    for name, part in module.items():
        if isinstance(part, nn.Module):
            yield from _layers(part)
        elif isinstance(part, list) and part and all(isinstance(p, nn.Module) for p in part):
            yield module, name, part


def towers(model: Any) -> list[Any]:
    return [part for name, part in model.items() if name != "language_model"]
