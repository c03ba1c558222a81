"""The states of a recurrent layer of mlx-lm after each token of one call.

Such a layer writes its states itself, gathers its convolution window at `lengths` (one row can have
several), and imports its rule from gated_delta.py or ssm.py (mlx_lm/models 0.32.2). Here the rule
runs token by token, as for decoding rows.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx

from ..records import Function
from .cache_classes import ArraysCache

RULES = {
    "gated_delta_update": ("q", "k", "v", "a", "b"),
    "ssm_update": ("hidden_states", "B", "C", "dt"),
}
"""Rule functions, with their arguments of shape (B, length, ...). Each also takes a `state`, and
returns (output, state)."""
OF_PADDED_ROWS = ("mask", "lengths")


class StateSteps(ArraysCache):
    """A copy of a row's recurrent cache for one call over its tokens. In its context, rules run
    token by token if their state is of this cache.

    Models of one architecture share the patched modules, so no other may run meanwhile: engine
    thread only.
    """

    def __init__(self, cache: ArraysCache, tokens: int, layer: object) -> None:
        super().__init__(len(cache.cache))
        self.cache = list(cache.cache)
        self.lengths = mx.arange(1, tokens + 1)
        self._tokens = tokens
        self._after: dict[int, list[mx.array]] = {}
        modules = {sys.modules[each.__module__] for each in type(layer).__mro__}
        self._before: list[tuple[ModuleType, str, Function]] = [
            (module, name, getattr(module, name))
            for module in modules
            for name in RULES
            if hasattr(module, name)
        ]

    def advance(self, N: int) -> None:
        """Does nothing: the lengths are valid for one call only."""

    def __enter__(self) -> None:
        for module, name, function in self._before:
            setattr(module, name, self._stepped(function, RULES[name]))

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
            self._after[at][tokens - 1]
            if at in self._after
            else None
            if state is None
            else mx.contiguous(state[tokens - 1 : tokens])
            for at, state in enumerate(self.cache)
        ]

    def after_unread(self, held: mx.array) -> list[Any]:
        """The states after the first `held` + 1 tokens, without a host read. `held`: (1,) int32."""
        return [
            mx.take(mx.concatenate(self._after[at]), held, axis=0)
            if at in self._after
            else None
            if state is None
            else mx.take(state, held, axis=0)
            for at, state in enumerate(self.cache)
        ]

    def _stepped(self, rule: Function, names: tuple[str, ...]) -> Function:
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
                now = {name: each[:, token : token + 1] for name, each in given.items()}
                bound.arguments.update(now, state=state)
                one, state = rule(*bound.args, **bound.kwargs)
                out.append(one)
                states.append(state)
            self._after[at] = states
            return mx.concatenate(out, axis=1), state

        return call
