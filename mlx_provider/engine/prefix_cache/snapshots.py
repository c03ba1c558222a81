"""Snapshots: states that cannot be cut, stored for one position of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..memory import leaves
from .arrays import ArrayPack
from .layer_kinds import Kind, Unstorable, kind
from .windows import window_attributes

Encoded = list[Any]
"""JSON-able form of a value: `[tag, ...]`. Arrays are indices into a pack."""


@dataclass(frozen=True)
class Snapshot:
    """Instance attributes of some layers of a row cache, by leaf index. Immutable."""

    layers: Mapping[int, Encoded]
    pack: ArrayPack
    inside: bool = False
    """Taken inside a message, for prompts that leave this one there."""

    @classmethod
    def of(cls, attributes: Mapping[int, Mapping[str, Any]]) -> Snapshot:
        """Copy and evaluate. Raises `Unstorable` for values other than arrays and plain data."""
        arrays: list[Any] = []
        layers = {leaf: encode(dict(each), arrays) for leaf, each in attributes.items()}
        return cls(layers, ArrayPack.of(arrays))

    def attributes(self, leaf: int) -> dict[str, Any]:
        decoded: dict[str, Any] = decode(self.layers[leaf], self.pack)
        return decoded

    @property
    def nbytes(self) -> int:
        return self.pack.nbytes

    @property
    def buffers(self) -> int:
        return self.pack.buffers


def take_snapshot(cache: list[Any], at: int | None = None) -> Snapshot | None:
    """Windows and states of a row. `None` if every layer keeps every token.

    `at`: their values after that many tokens, at the beginning of the last pass (of several tokens)
    or within it; only windows still have the data for this. A window that has not wrapped is
    included, as it may wrap before the row is stored. Raises `Unstorable`, and `ValueError` if the
    data for `at` is gone.
    """
    attributes = {}
    for leaf, layer in enumerate(leaves(cache)):
        which = kind(layer) if layer is not None else Kind.APPEND
        if which is Kind.WINDOW:
            attributes[leaf] = window_attributes(layer, at)
        elif which is Kind.STATE:
            if at is not None:
                raise ValueError(f"the state of layer {leaf} is not that after {at} tokens")
            own = vars(layer)
            # `ArraysCache`: paddings and lengths belong to the batch, not to the row
            attributes[leaf] = {"cache": own["cache"]} if "cache" in own else own
    return Snapshot.of(attributes) if attributes else None


def encode(value: Any, arrays: list[Any]) -> Encoded:
    if isinstance(value, mx.array):
        arrays.append(value)
        return ["array", len(arrays) - 1]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value]
    if isinstance(value, (list, tuple)):
        tag = "list" if isinstance(value, list) else "tuple"
        return [tag, *(encode(item, arrays) for item in value)]
    if isinstance(value, dict) and all(isinstance(k, (str, int)) for k in value):
        return ["dict", *([k, encode(item, arrays)] for k, item in value.items())]
    raise Unstorable(f"a cache that holds a {type(value).__name__} cannot be kept")


def decode(encoded: Encoded, pack: ArrayPack) -> Any:
    """The arrays of the result share no memory with the pack after evaluation."""
    tag, *rest = encoded
    if tag == "array":
        return mx.contiguous(pack[rest[0]])
    if tag == "value":
        return rest[0]
    if tag == "dict":
        return {k: decode(item, pack) for k, item in rest}
    items = [decode(item, pack) for item in rest]
    return items if tag == "list" else tuple(items)
