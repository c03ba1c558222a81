"""Recurrent layers in a call with decoding rows and several tokens of one row.

To the model, each of these tokens is a row. `route` makes the recurrent modules of mlx-lm and
mlx-vlm accept `StateParts`: they run once for the decoding rows and once for each other part.

Drafts need the state after each token, which `StateSteps` records. A layer of mlx-lm advances its
state by a *rule*, a function from gated_delta.py or ssm.py (mlx_lm/models 0.32.2), which then runs
token by token. A layer of mlx-vlm gives `update_recurrent` an `update(state, n)`, which returns
the first n states, too. Both cut one convolution window per entry of `lengths`, here per token."""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedModel
from ..records import Function
from .cache_classes import ArraysCache, StateCache, by_layer, layers_of

RULES = {
    "gated_delta_update": ("q", "k", "v", "a", "b"),
    "ssm_update": ("hidden_states", "B", "C", "dt"),
}
"""Rules, with their arguments (B, length, ...); each takes a `state`, returns (output, state)."""
OF_PADDED_ROWS = ("mask", "lengths")
"""Arguments of rules that only padded rows need."""
ROUTES_ATTRIBUTE = "routes_state_parts"
"""The mark of a call that accepts `StateParts`."""


class StateSteps(StateCache):
    """A copy of a row's recurrent cache for one call of `layer` over several tokens. In its
    context, rules run token by token if their state is of this cache. Models of one architecture
    share the modules whose rules are replaced: engine thread only."""

    def __init__(self, cache: ArraysCache, tokens: int, layer: object) -> None:
        super().__init__(len(cache.cache))
        self.cache = list(cache.cache)
        self.lengths = mx.arange(1, tokens + 1)
        self._tokens = tokens
        self._after: dict[int, list[mx.array]] = {}  # by index: the state after each token
        modules = {sys.modules[base.__module__] for base in type(layer).__mro__}
        places = [(module, name) for module in modules for name in RULES if hasattr(module, name)]
        self._originals = [(module, name, getattr(module, name)) for module, name in places]

    def advance(self, N: int) -> None:
        """Does nothing: the lengths are valid for one call only."""

    def update_recurrent(
        self, index: int, length: int, update: Callable[[Any, Any], tuple[Any, ...]]
    ) -> tuple[Any, Any]:
        output, state, earlier = update(self.cache[index], length - 1)
        self._after[index] = [*(earlier[:, token] for token in range(length - 1)), state]
        self.cache[index] = state
        return output, state

    def __enter__(self) -> None:
        for module, name, function in self._originals:
            setattr(module, name, self._step_tokens(function, RULES[name]))

    def __exit__(self, *raised: object) -> None:
        for module, name, function in self._originals:
            setattr(module, name, function)

    @property
    def complete(self) -> bool:
        """Whether the state after each token is known. A window has one entry per token."""
        return all(
            state is None or at in self._after or state.shape[0] == self._tokens
            for at, state in enumerate(self.cache)
        )

    def after(self, tokens: int) -> list[Any]:
        """The entries of the row's cache after the first `tokens` tokens of the call."""
        states = {at: recorded[tokens - 1] for at, recorded in self._after.items()}
        for at, state in enumerate(self.cache):
            if at not in states and state is not None:
                states[at] = state[tokens - 1 : tokens]
        found = [states.get(at) for at in range(len(self.cache))]
        return [None if state is None else mx.contiguous(state) for state in found]

    def _step_tokens(self, rule: Function, names: tuple[str, ...]) -> Function:
        signature = inspect.signature(rule)

        @functools.wraps(rule)
        def call(*args: Any, **kwargs: Any) -> tuple[mx.array, mx.array]:
            bound = signature.bind(*args, **kwargs)
            state = bound.arguments.get("state")
            at = next((i for i, entry in enumerate(self.cache) if entry is state), None)
            if state is None or at is None:  # of another row
                return rule(*args, **kwargs)  # type: ignore[no-any-return]
            for name in OF_PADDED_ROWS:
                bound.arguments.pop(name, None)
            given = {name: bound.arguments[name] for name in names}
            out, states = [], []
            for token in range(self._tokens):
                now = {name: array[:, token : token + 1] for name, array in given.items()}
                bound.arguments.update(now, state=state)
                one, state = rule(*bound.args, **bound.kwargs)
                out.append(one)
                states.append(state)
            self._after[at] = states
            return mx.concatenate(out, axis=1), state

        return call


@dataclass
class StateRun:
    """The part of a layer's call for some rows, or for the tokens of one row (`turned`)."""

    cache: Any
    rows: slice
    turned: bool = False
    drafts: bool = False
    """Whether to record the state after each token."""
    _steps: StateSteps | None = None

    def run(self, call: Callable[[Any], mx.array], layer: object) -> mx.array:
        """`call(cache)`. Raises `UnsupportedModel` if drafts need states that are not recorded."""
        if not self.drafts:
            return call(self.cache)
        tokens = self.rows.stop - self.rows.start
        steps = self._steps = StateSteps(self.cache, tokens, layer)
        with steps:
            found = call(steps)
        if not steps.complete:
            raise UnsupportedModel(f"{type(layer).__name__} keeps no state after each token")
        return found

    def keep(self, tokens: int) -> None:
        """After drafts: give the cache, unchanged until now, the state after `tokens` tokens."""
        if self._steps is not None:
            self.cache.cache = self._steps.after(tokens)


class StateParts:
    """The states of one recurrent layer for all parts of a call, in the form of one cache."""

    lengths = left_padding = None

    def __init__(self, runs: Sequence[StateRun]) -> None:
        self.runs = runs

    def make_mask(self, N: int) -> None:
        """There is no padding."""

    def __getitem__(self, index: int) -> mx.array:
        """Only for reading: one entry per row of the call, also for tokens of one row."""
        return mx.concatenate([self._rows(run, index) for run in self.runs])

    def _rows(self, run: StateRun, index: int) -> mx.array:
        state: mx.array = run.cache[index]
        return mx.repeat(state, run.rows.stop - run.rows.start, axis=0) if run.turned else state


def route(run: Callable[[list[Any]], Any], cache: list[Any]) -> None:
    """Find the modules that read a state of `cache`, and make their classes accept `StateParts`.
    `run` calls the model on one token with the given cache; nothing is evaluated. Idempotent."""
    if not any(isinstance(layer, ArraysCache) for layer in layers_of(cache)):
        return
    found: set[type] = set()
    run([by_layer(partial(_watch, found), layer) for layer in cache])
    for kind in found:
        if not getattr(kind.__call__, ROUTES_ATTRIBUTE, False):
            setattr(kind, "__call__", _route_calls(kind.__call__))  # noqa: B010


def _route_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(value, StateParts) for value in (*args, *kwargs.values())):
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        _, hidden_name, *_ = bound.arguments  # after `self`
        named = bound.arguments.items()
        cache_name = next(name for name, value in named if isinstance(value, StateParts))
        hidden, parts = bound.arguments[hidden_name], bound.arguments[cache_name]

        def run(cache: ArraysCache) -> mx.array:
            bound.arguments[cache_name] = cache
            return original(*bound.args, **bound.kwargs)  # type: ignore[no-any-return]

        out = []
        for part in parts.runs:
            own = hidden[part.rows]
            bound.arguments[hidden_name] = own.swapaxes(0, 1) if part.turned else own
            found = part.run(run, args[0])
            out.append(found.swapaxes(0, 1) if part.turned else found)
        return mx.concatenate(out)

    setattr(call, ROUTES_ATTRIBUTE, True)
    return call


def _watch(found: set[type], layer: Any) -> Any:
    """An empty cache like `layer` that records the class of each module that reads a state."""
    if not isinstance(layer, ArraysCache):
        return layer
    kind = type(layer)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __getitem__(self, index: int) -> Any:
            if (module := _calling_module(sys._getframe(1))) is not None:
                found.add(module)
            return super().__getitem__(index)

    return Watched(len(layer.cache))


def _calling_module(frame: FrameType | None) -> type | None:
    """The class of the innermost module whose method is on the stack."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return type(module)
        frame = frame.f_back
    return None
