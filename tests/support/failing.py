"""A real model whose passes fail on demand."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from mlx_provider import PrefillChunk
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.request import Request
from mlx_provider.testing.driver import new_request
from stepping import step_until, submit
from wrapped_model import WrappedModel


def never(*given: list[int]) -> bool:
    return False


@dataclass
class First:
    """True the first `left` times that a condition holds."""

    left: int
    condition: Callable[..., bool]

    def __call__(self, *given: list[int]) -> bool:
        fails = self.left > 0 and self.condition(*given)
        self.left -= fails
        return fails


@dataclass
class Failing(WrappedModel):
    """Records the number of tokens of each pass. A pass fails after it has changed its caches."""

    fails: Callable[[list[int], list[int]], bool] = never
    """Whether a pass over these tokens at these positions, of rows or with them, fails."""
    fails_prefill: Callable[[list[int]], bool] = never
    prefills: list[int] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        tokens = list(chunk.prompt.tokens[chunk.start : chunk.stop])
        self.prefills.append(len(tokens))
        logits = self.inner.prefill(chunk)
        return _checked(logits, fails=self.fails_prefill(tokens))

    def decode(
        self, tokens: mx.array, cache: list[Any], positions: mx.array, *wanted: mx.array
    ) -> mx.array:
        self.decodes.append(tokens.size)
        logits = self.inner.decode(tokens, cache, positions, *wanted)
        given: Any = (tokens.tolist(), positions.tolist())
        return _checked(logits, fails=self.fails(*given))


def _checked(logits: mx.array, *, fails: bool) -> mx.array:
    if fails:
        raise RuntimeError("[METAL] command buffer failed: Insufficient Memory")
    return logits


def streams(engine: Engine, count: int = 3, max_tokens: int = 30) -> list[Request]:
    requests = [new_request([30 + i] * (6 + 9 * i), max_tokens=max_tokens) for i in range(count)]
    submit(engine, *requests)
    return requests


def decoding(engine: Engine, count: int = 3) -> list[Request]:
    """The same once all of them decode."""
    requests = streams(engine, count)
    step_until(engine, lambda: len(engine.scheduler.running) >= count)
    return requests


def fail_once(patch: pytest.MonkeyPatch, name: str, at: int) -> list[str]:
    """Let one call of a function of MLX raise, after `at` others. Returns what has failed."""
    work, calls, failed = getattr(mx, name), itertools.count(), list[str]()

    def call(*args: Any, **more: Any) -> Any:
        if next(calls) == at:
            failed.append(name)
            raise RuntimeError("[malloc] out of memory")
        return work(*args, **more)

    patch.setattr(mx, name, call)
    return failed
