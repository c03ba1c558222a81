"""Features of a vision tower as arrays and an outline, to send them to another process.

An outline is JSON: it has the place of each array and never names code. The classes come from the
model (`SpreadsFeatures`), which both processes have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..errors import BadRequest

if TYPE_CHECKING:
    import mlx.core as mx

Outline = list[Any]
"""`[kind, ...]`: see `outline`."""
Types = Sequence[type[Any]]
DEEPEST = 16
"""Levels of features; none known has a third."""


@runtime_checkable
class SpreadsFeatures(Protocol):
    """A `LoadedModel` whose features can be rebuilt from their arrays."""

    @property
    def feature_types(self) -> Types:
        """The dataclasses in its features, in the same order in all processes."""


def leaves(features: Any) -> list[mx.array]:
    """The arrays within features, in the order in which `rebuilt` takes them.

    Features are arrays, strings, numbers, `None`, and dataclasses, tuples, lists and mappings (with
    string keys) of features.
    """
    return list(_leaves(features))


def _leaves(features: Any) -> Iterator[mx.array]:
    if _is_array(features):
        yield features
    for inner in _parts(features):
        yield from _leaves(inner)


def outline(features: Any, types: Types) -> Outline:
    """Features without the content of their arrays. `types`: the model's `feature_types`.

    Raises `TypeError` for other content than `leaves` allows.
    """
    if _is_array(features):
        return ["array", list(features.shape), str(features.dtype).rpartition(".")[2]]
    if features is None or isinstance(features, str | int | float):
        return ["value", features]
    inner = [outline(part, types) for part in _parts(features)]
    if type(features) in types:
        return ["record", list(types).index(type(features)), inner]
    if isinstance(features, Mapping) and all(isinstance(key, str) for key in features):
        return ["mapping", list(features), inner]
    if isinstance(features, list | tuple):
        return ["list" if isinstance(features, list) else "tuple", inner]
    raise TypeError(f"features with a {type(features).__name__} cannot be sent to another process")


def rebuilt(described: Outline, arrays: Sequence[mx.array], types: Types) -> Any:
    """Features of an outline and of the arrays of `leaves`. Raises `BadRequest` if they do not
    match."""
    left = iter(arrays)
    try:
        made = _rebuilt(described, left, types, 0)
    except (StopIteration, TypeError, ValueError, IndexError) as error:
        raise BadRequest(f"these are no features of this model: {error!r}") from error
    if next(left, None) is not None:
        raise BadRequest("these are no features of this model: more arrays than places")
    return made


def _rebuilt(described: Any, arrays: Iterator[mx.array], types: Types, depth: int) -> Any:
    if depth > DEEPEST:
        raise ValueError("too many levels")
    kind, *rest = described
    if kind == "array":
        return _fitting(next(arrays), *rest)
    if kind == "value":
        return _plain(*rest)
    inner = [_rebuilt(each, arrays, types, depth + 1) for each in rest[-1]]
    if kind == "record":
        return _record(types, rest[0], inner)
    if kind == "mapping":
        return dict(zip(rest[0], inner, strict=True))
    if kind in ("list", "tuple"):
        return inner if kind == "list" else tuple(inner)
    raise ValueError(f"no kind {kind!r}")


def _fitting(array: Any, shape: list[int], dtype: str) -> Any:
    found = list(array.shape), str(array.dtype).rpartition(".")[2]
    if found != (shape, dtype):
        raise ValueError(f"an array is {found} instead of {(shape, dtype)}")
    return array


def _plain(value: Any) -> Any:
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError("a value that is none")
    return value


def _record(types: Types, index: int, inner: Sequence[Any]) -> Any:
    kind = types[index] if index >= 0 else None
    if kind is None:
        raise IndexError(index)
    names = [each.name for each in fields(kind)]
    return kind(**dict(zip(names, inner, strict=True)))


def _parts(features: Any) -> list[Any]:
    if is_dataclass(features) and not isinstance(features, type):
        return [getattr(features, each.name) for each in fields(features)]
    if isinstance(features, Mapping):
        return list(features.values())
    return list(features) if isinstance(features, list | tuple) else []


def _is_array(value: Any) -> bool:
    """By its attributes: listing plugins must not import MLX."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "nbytes")
