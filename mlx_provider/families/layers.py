"""Shows what single layers put out, for drafters that read them.

A call uses a copy of the model that shares all parts, with other objects in the places of those
layers. The model itself does not change, and keeps nothing of a call.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..errors import BadRequest
from ..records import ShowsHidden
from .logits import Path

NAME = "layers"
"""The attribute of mlx-lm's and mlx-vlm's models that lists their layers (0.32.2, 0.7.10)."""


class Outputs:
    """The outputs of some layers in one call of a model."""

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers`: indices in the order in which the outputs are wanted."""
        self.layers = layers
        self._found: dict[int, mx.array] = {}

    def add(self, layer: int, output: mx.array) -> None:
        """(B, length, hidden)"""
        self._found[layer] = output

    def joined(self) -> mx.array:
        """Side by side: (B, length, layers * hidden). Raises `KeyError` if a layer did not run."""
        return mx.concatenate([self._found[layer] for layer in self.layers], axis=-1)


def watched(part: Any, outputs: Outputs) -> Any:
    """A copy of a model's part with layers. Its calls give `outputs` what these layers put out."""
    twin = copy.copy(part)
    wanted = set(outputs.layers)
    setattr(
        twin,
        NAME,
        [
            _Watched(layer, at, outputs) if at in wanted else layer
            for at, layer in enumerate(getattr(part, NAME))
        ],
    )
    return twin


def at(model: Any, path: Path | None) -> Any:
    """The part of a model that a path of attributes leads to."""
    for name in path or ():
        model = getattr(model, name)
    return model


def check_layers(part: Any, layers: Sequence[int], model: ShowsHidden, cache: list[Any]) -> None:
    """Raises `BadRequest` if a model does not show the outputs of these layers.

    model: shows them; `part`: its part with layers; `cache`: an empty row cache of it.
    """
    count = len(getattr(part, NAME, None) or ())
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong:
        summary = f"the model has {count} layers, and no layer {wrong[0]}"
        raise BadRequest(summary, param="drafter")
    one = mx.array([1])
    try:
        mx.eval(model.decode_hidden(one, cache, one))
    except KeyError as error:
        summary = f"the model does not show the output of its layer {error}"
        raise BadRequest(summary, param="drafter") from None


class _Watched:
    """A layer that shows its output."""

    def __init__(self, layer: Any, index: int, outputs: Outputs) -> None:
        self._layer = layer
        self._index = index
        self._outputs = outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._layer(*args, **kwargs)
        self._outputs.add(self._index, output[0] if isinstance(output, tuple) else output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
