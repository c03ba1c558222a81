"""Reasoning formats of model families."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_provider import ReasoningParser, hookimpl

from .think import PARSERS

mlx_provider_api = 1


@hookimpl
def mlx_reasoning_parsers() -> Iterable[ReasoningParser]:
    yield from PARSERS
