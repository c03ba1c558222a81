"""Recurrent layers in a call with decoding rows and several tokens of one row.

The model treats the tokens of one row as rows. `route` makes the recurrent modules of mlx-lm and
mlx-vlm accept `StateParts`: they run once for the decoding rows and once for each other part.

For the state after each token, the rule of a layer of mlx-lm runs token by token, as for decoding
rows: the layer imports it from gated_delta.py or ssm.py (mlx_lm/models 0.32.2), and writes its
states itself. Those of mlx-vlm give all states to `update_recurrent`. Both gather a convolution
window at `lengths` (one row can have several)."""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType, ModuleType
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
"""Rule functions, with their arguments of shape (B, length, ...). Each also takes a `state`, and
returns (output, state)."""
OF_PADDED_ROWS = ("mask", "lengths")


class StateSteps(StateCache):
    """A copy of a row's recurrent cache for one call over its tokens. In its context, rules run
    token by token if their state is of this cache. Models of one architecture share the patched
    modules: engine thread only."""

    def __init__(self, cache: ArraysCache, tokens: int, layer: object) -> None:
        super().__init__(len(cache.cache))
        self.cache = list(cache.cache)
        self.lengths = mx.arange(1, tokens + 1)
        self._tokens = tokens
        self._after: dict[int, list[mx.array]] = {}
        modules = {sys.modules[base.__module__] for base in type(layer).__mro__}
        self._before: list[tuple[ModuleType, str, Function]] = [
            (module, name, getattr(module, name))
            for module in modules
            for name in RULES
            if hasattr(module, name)
        ]

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
        for module, name, function in self._before:
            setattr(module, name, self._step_tokens(function, RULES[name]))

    def __exit__(self, *raised: object) -> None:
        for module, name, function in self._before:
            setattr(module, name, function)

    @property
    def complete(self) -> bool:
        return all(
            state is None or at in self._after or state.shape[0] == self._tokens
            for at, state in enumerate(self.cache)
        )

    def after(self, tokens: int) -> list[Any]:
        return [
            mx.contiguous(self._after[at][tokens - 1])
            if at in self._after
            else None
            if state is None
            else mx.contiguous(state[tokens - 1 : tokens])
            for at, state in enumerate(self.cache)
        ]

    def _step_tokens(self, rule: Function, names: tuple[str, ...]) -> Function:
        signature = inspect.signature(rule)

        @functools.wraps(rule)
        def call(*args: Any, **kwargs: Any) -> tuple[mx.array, mx.array]:
            bound = signature.bind(*args, **kwargs)
            state = bound.arguments.get("state")
            at = next((i for i, own in enumerate(self.cache) if own is state), None)
            if state is None or at is None:
                found: tuple[mx.array, mx.array] = rule(*args, **kwargs)
                return found
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


ROUTES_ATTRIBUTE = "routes_state_parts"


@dataclass
class StateRun:
    """The call of a layer for some of its rows, or for tokens of one row."""

    cache: Any
    rows: slice
    turned: bool = False
    drafts: bool = False
    """Whether the state after each token is recorded, which `StateSteps` must support."""
    _steps: StateSteps | None = None

    def run(self, call: Callable[[Any], mx.array], layer: object) -> mx.array:
        """Raises `UnsupportedModel`."""
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
    """Make each module accept `StateParts` that reads a state of `cache` while `run` runs. `run`
    calls the model on one token with the given cache; nothing is evaluated. Idempotent."""
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
        _, states, *_ = bound.arguments
        cache = next(n for n, value in bound.arguments.items() if isinstance(value, StateParts))
        hidden, parts = bound.arguments[states], bound.arguments[cache]
        out = []
        for part in parts.runs:
            own = hidden[part.rows]
            bound.arguments[states] = own.swapaxes(0, 1) if part.turned else own

            def run(own: ArraysCache) -> mx.array:
                bound.arguments[cache] = own
                made: mx.array = original(*bound.args, **bound.kwargs)
                return made

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
            if (module := _asking(sys._getframe(1))) is not None:
                found.add(module)
            return super().__getitem__(index)

    return Watched(len(layer.cache))


def _asking(frame: FrameType | None) -> type | None:
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return type(module)
        frame = frame.f_back
    return None
