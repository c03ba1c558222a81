"""How many Metal command buffers a decode step takes, by MLX's own rule, on a tiny model's graph.

A buffer is closed behind an operation when it has more operations than one limit, or its arrays
have more elements than the other (mlx 0.32.4, backend/metal/device.cpp, `needs_commit`; an array
counts once per buffer, with all that is allocated for it). The arrays of the tiny model count as
those of a real one: 4-bit weights, keys and values of long rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx

from kernel_count import VIEWS
from mlx_provider.engine.execution.batch_layout import Layout
from mlx_provider.engine.execution.decode_batch import run_pass
from mlx_provider.families.text import TextModel
from mlx_provider.upstream.runtime import BUFFERS

OURS = tuple(map(int, BUFFERS.values()))
DEFAULT = (50, 50)
"""Of a Max chip; 40 of a base or Pro chip."""
PER_WEIGHT = 1 / 8 + 2 / 64
"""Elements of a weight in 4 bits, with its share of scales and biases."""
TOKENS = 20
"""Tokens of a real row for each of the tiny one."""
Array = tuple[str, tuple[int, ...], Any]


@dataclass(frozen=True)
class Real:
    """Sizes of the model that the tiny one stands for."""

    weights: float
    token: int
    """Values of keys, or of values, of one token in one layer."""
    wider: float
    """Times the values of hidden states."""


@dataclass(frozen=True)
class Operation:
    dispatches: int
    arrays: Mapping[str, float]
    """Elements by allocated array."""


def buffers(operations: Sequence[Operation], limits: Sequence[int]) -> int:
    """Of a pass, with the last one, which the end of the pass closes."""
    most_operations, most_elements = limits
    closed = dispatches = 0
    held: dict[str, float] = {}
    for each in operations:
        dispatches += each.dispatches
        held.update(each.arrays)
        if dispatches > most_operations or int(sum(held.values())) >> 20 > most_elements:
            closed, dispatches, held = closed + 1, 0, {}
    return closed + bool(dispatches)


def operations(model: TextModel, layout: Layout, real: Real) -> list[Operation]:
    """Of the next pass of the layout, which can run no more then."""
    seen: list[dict[str, Any]] = []
    (each,) = layout.passes()

    def step(tokens: mx.array) -> mx.array:
        return run_pass(model, each, tokens, [row.length for row in each.rows]).logits

    export: Callable[..., None] = mx.export_function
    export(seen.append, step, mx.array([30] * len(each.rows)))
    constants: list[tuple[str, mx.array]] = next(filter(_constant, seen))["constants"]
    size = _sizes({name: array.shape for name, array in constants}, real)
    allocated: dict[str, str] = {}
    """The array in whose memory another one lies."""
    found = []
    for node in (d for d in seen if d["type"] == "primitive"):
        inputs: list[Array] = node["inputs"]
        name, view = node["name"], node["name"] in VIEWS
        for output, *_ in node["outputs"]:
            within = inputs[0][0] if view or name == "SliceUpdate" else output
            allocated[output] = allocated.get(within, within)
        used = [] if view and name != "Depends" else [*inputs, *node["outputs"]]
        arrays = {allocated.get(each[0], each[0]): each for each in used}
        count = 0 if view else len(inputs) if name == "Concatenate" else 1
        found.append(Operation(count, {at: size(at, array) for at, array in arrays.items()}))
    return found


def _constant(node: Mapping[str, Any]) -> bool:
    return bool(node["type"] == "constants")


def _sizes(shapes: Mapping[str, tuple[int, ...]], real: Real) -> Callable[[str, Array], float]:
    weights = {n: prod(shape) for n, shape in shapes.items() if 2 <= len(shape) <= 3}
    each = real.weights * PER_WEIGHT / sum(weights.values())

    def size(name: str, array: Array) -> float:
        shape = shapes.get(name, array[1])
        if name in weights:
            return each * weights[name]
        if name in shapes and len(shape) == 4:  # keys or values
            return shape[0] * shape[2] * TOKENS * real.token
        return prod(shape) * real.wider

    return size
