"""Reasoning formats of model families."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_provider import ReasoningParser, hookimpl

from . import think
from . import think as phrases

mlx_provider_api = 1


@hookimpl
def mlx_reasoning_parsers() -> Iterable[ReasoningParser]:
    for module in (think, phrases):
        yield from module.PARSERS
