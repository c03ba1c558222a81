"""Tool-call formats of model families: one module per format, with shared structures.

Formats that address whole messages (Harmony, Muse), or label their reasoning (UI-TARS), also have
their reasoning parsers here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mlx_provider import ReasoningParser, ToolParser, hookimpl

from . import (
    auto,
    function_tags,
    functionary,
    gemma,
    harmony,
    invoke_tags,
    json_blocks,
    keyed,
    minicpm,
    minimax_m3,
    muse,
    named_values,
    pythonic,
    sections,
    step3,
    ui_tars,
)
from .turn_ends import TURN_ENDS

mlx_provider_api = 1

MODULES = (
    json_blocks,
    function_tags,
    invoke_tags,
    keyed,
    sections,
    pythonic,
    gemma,
    minicpm,
    minimax_m3,
    named_values,
    functionary,
    step3,
    harmony,
    muse,
    ui_tars,
    auto,
)


@hookimpl
def mlx_tool_parsers() -> Iterable[ToolParser]:
    """Every format of this package."""
    for module in MODULES:
        for parser in module.PARSERS:
            yield replace(parser, turn_ends=TURN_ENDS)


@hookimpl
def mlx_reasoning_parsers() -> Iterable[ReasoningParser]:
    """Reasoning parsers of the formats that need one parser for reasoning and calls."""
    for module in (functionary, harmony, muse, ui_tars):
        yield from module.REASONING_PARSERS
