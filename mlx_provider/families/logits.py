"""Applies the output matrix only to the tokens whose logits are wanted.

Upstream's models apply it to every token of a call. It is as large as several layers, and a prompt
chunk needs it only after its last token, if at all."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ..isolation import Fault, attempt
from ..records import HiddenStatesModel, PrefillChunk

NAMES = ("language_model", "model", "backbone", "transformer")
"""Attributes of upstream's models that hold the part below the output matrix, or contain it."""
CLOSE = 0.05
"""Largest logit difference from another order of summation, relative to the largest logit."""

Path = tuple[str, ...]  # names of attributes, from the model inwards
Keep = Callable[[mx.array], mx.array]
"""From hidden states (B, length, hidden) to those whose logits are wanted, in three dimensions."""


def last_token(hidden: mx.array) -> mx.array:
    return hidden[:, -1:]


def rows_at(logits_at: mx.array | None) -> Keep:
    """A `Keep` for the rows `logits_at` of a call with one token per row. `None`: all rows."""
    return lambda hidden: hidden if logits_at is None else hidden[logits_at]


class StateStore:
    """A `Keep` that also stores the hidden states that `states_at` selects (default: `keep`)."""

    def __init__(self, keep: Keep, states_at: Keep | None = None) -> None:
        self._keep = keep
        self._states_at = states_at or keep
        self.hidden = mx.zeros((0, 0, 0))

    def __call__(self, hidden: mx.array) -> mx.array:
        self.hidden = self._states_at(hidden)
        return self._keep(hidden)


class FromHidden:
    """`prefill` and `decode` of a `LoadedModel`, for a class with `HiddenStatesModel`'s methods."""

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        return cast("HiddenStatesModel", self).prefill_hidden(chunk, 1)[0]

    def decode(
        self,
        tokens: mx.array,
        cache: list[Any],
        positions: mx.array,
        logits_at: mx.array | None = None,
    ) -> mx.array:
        return cast("HiddenStatesModel", self).decode_hidden(tokens, cache, positions, logits_at)[0]


def failure(trial: Callable[[], str]) -> str:
    """The problem that `trial` returns, or the error that it raises, in one line. Empty: none. A
    model's code may raise anything."""
    found = attempt(trial)
    return found.summary if isinstance(found, Fault) else found


def find_backbone(model: Any, call: Callable[[Any], mx.array]) -> Path | None:
    """Find the attributes that lead to the part of `model` below its output matrix, by trial.
    `call` gives a model fixed tokens and returns logits (1, tokens, vocab). `None`: no part has
    states that give the same logits. `narrow_output` then cuts the logits of the whole model."""
    whole = last_token(call(model))

    def problem(path: Path) -> str:
        return "" if _close(call(narrow_output(model, path, last_token)), whole) else "other logits"

    fitting = [path for path in _paths(model) if not failure(partial(problem, path))]
    return max(fitting, key=len, default=None)


def _close(found: mx.array, whole: mx.array) -> bool:
    most = CLOSE * mx.max(mx.abs(whole))
    return found.shape == whole.shape and bool(mx.all(mx.abs(found - whole) <= most).item())


def narrow_output(model: Any, path: Path | None, keep: Keep) -> Callable[..., mx.array]:
    """A callable like `model` that returns only the logits that `keep` selects: a copy that shares
    all parts of the model. `path`: result of `find_backbone`."""
    if path is None:
        return lambda *args, **kwargs: keep(model(*args, **kwargs))
    if not path:
        return _Kept(model, keep)
    twin: Callable[..., mx.array] = copy.copy(model)
    setattr(twin, path[0], narrow_output(getattr(model, path[0]), path[1:], keep))
    return twin


class _Kept:
    def __init__(self, part: Any, keep: Keep) -> None:
        self._part = part
        self._keep = keep

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        return self._keep(self._part(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def _paths(model: Any, before: Path = ()) -> Iterator[Path]:
    for name in NAMES:
        part = getattr(model, name, None)
        if isinstance(part, nn.Module):
            yield (*before, name)
            yield from _paths(part, (*before, name))
