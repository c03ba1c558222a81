"""Features travel as arrays and an outline that names no code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from mlx_provider import BadRequest
from mlx_provider.families.vision.model import VisionFeatures
from mlx_provider.records.features import leaves, outline, rebuilt


@dataclass(frozen=True)
class Odd:
    """Features of a family of its own."""

    named: dict[str, Any]
    many: list[Any]
    note: str | None = None


TYPES = (VisionFeatures, Odd)
ROWS = mx.arange(6, dtype=mx.float32).reshape(2, 3)


def sent(features: Any) -> Any:
    return rebuilt(json.loads(json.dumps(outline(features, TYPES))), leaves(features), TYPES)


def test_features_come_back_as_they_were() -> None:
    seen = VisionFeatures(ROWS, (ROWS + 1, ROWS.astype(mx.bfloat16)))
    odd = Odd({"a": ROWS, "b": (seen, 3, 0.5)}, [[], [True, None]], "x")
    back = sent(odd)
    assert isinstance(back, Odd)
    assert isinstance(back.named["b"][0], VisionFeatures)
    assert isinstance(back.named["b"][0].deepstack, tuple)
    assert outline(back, TYPES) == outline(odd, TYPES)
    assert all(a is b for a, b in zip(leaves(back), leaves(odd), strict=True))


@pytest.mark.parametrize(
    "described",
    [
        ["record", 2, []],
        ["record", -1, []],
        ["record", 0, [["array", [2, 3], "float32"]] * 3],
        ["array", [3, 2], "float32"],
        ["array", [2, 3], "float16"],
        ["tuple", []],
        ["tuple", [["array", [2, 3], "float32"]] * 2],
        ["class", "os.system", []],
        ["value", {"a": 1}],
        ["mapping", ["a"], []],
        [],
        None,
        7,
    ],
)
def test_an_outline_of_something_else_is_refused(described: Any) -> None:
    with pytest.raises(BadRequest, match="no features of this model"):
        rebuilt(described, [ROWS], TYPES)


def test_an_endless_outline_is_refused() -> None:
    deep: Any = ["tuple", []]
    for _ in range(2000):
        deep = ["tuple", [deep]]
    with pytest.raises(BadRequest, match="too many levels"):
        rebuilt(deep, [], TYPES)


def test_what_no_model_has_named_is_not_sent() -> None:
    with pytest.raises(TypeError, match="VisionFeatures cannot be sent"):
        outline(VisionFeatures(ROWS), (Odd,))
