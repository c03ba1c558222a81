"""Logits where they are wanted: the output matrix is applied to no other token.

Upstream's models apply it to every token of a call. It is as large as several layers, and a chunk
of a prompt wants it after its last token alone, if at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .trial import failure

NAMES = ("language_model", "model", "backbone", "transformer")
"""What upstream's models call the part below their output matrix, from the outside in."""
CLOSE = 0.05
"""Difference of logits, as a share of the largest, that another order of summation may make."""

Path = tuple[str, ...]
Keep = Callable[[mx.array], mx.array]
"""Hidden states (B, length, hidden) -> those whose logits are wanted, of three dimensions."""


def last_token(hidden: mx.array) -> mx.array:
    """Of every row, the last position alone."""
    return hidden[:, -1:]


def rows_at(logits_at: mx.array | None) -> Keep:
    """Of a call with one token a row, these rows; `None`: all."""
    return lambda hidden: hidden if logits_at is None else hidden[logits_at]


class Shown:
    """Keeps positions as another `Keep` does, and shows their hidden states, or other ones."""

    def __init__(self, keep: Keep, show: Keep | None = None) -> None:
        self._keep = keep
        self._show = show or keep
        self.hidden = mx.zeros((0, 0, 0))
        """Of the last call, what `show` keeps."""

    def __call__(self, hidden: mx.array) -> mx.array:
        self.hidden = self._show(hidden)
        return self._keep(hidden)


def find_backbone(model: Any, call: Callable[[Any], mx.array]) -> Path | None:
    """Attributes that lead to the part of `model` below its output matrix, found by trying.

    call: a model -> logits (1, some tokens, vocab) of always the same tokens. `None`: there is no
    part whose states give the same logits, and `narrowed` narrows what the whole model returns.
    """
    whole = last_token(call(model))

    def problem(path: Path) -> str:
        return "" if _close(call(narrowed(model, path, last_token)), whole) else "other logits"

    fitting = [path for path in _paths(model) if not failure(partial(problem, path))]
    return max(fitting, key=len, default=None)


def _close(found: mx.array, whole: mx.array) -> bool:
    if found.shape != whole.shape:
        return False
    most = CLOSE * mx.max(mx.abs(whole))
    return bool(mx.all(mx.abs(found - whole) <= most).item())


def narrowed(model: Any, path: Path | None, keep: Keep) -> Callable[..., mx.array]:
    """`model`, to be called as it is, with logits of the kept positions alone.

    A twin that shares every part of it: the model itself is not changed.
    """
    if path is None:
        return lambda *args, **kwargs: keep(model(*args, **kwargs))
    twin: Callable[..., mx.array] = _twin(model, path, keep)
    return twin


def _twin(model: Any, path: Path, keep: Keep) -> Any:
    twin, name = copy.copy(model), path[0]
    part = getattr(model, name)
    setattr(twin, name, _twin(part, path[1:], keep) if path[1:] else _Kept(part, keep))
    return twin


class _Kept:
    """A part of a model whose output is narrowed."""

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
