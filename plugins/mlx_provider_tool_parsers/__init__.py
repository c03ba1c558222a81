"""Tool-call formats of model families, with shared structures. Formats that address whole messages
(Harmony, Muse) also have their reasoning parsers here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mlx_provider import ReasoningParser, ToolParser, hookimpl

from . import (
    auto,
    function_tags,
    gemma,
    harmony,
    json_blocks,
    keyed,
    minicpm,
    minimax_m3,
    pythonic,
    sections,
)
from . import auto as muse
from . import function_tags as invoke_tags
from . import keyed as apertus
from .json_text import TURN_ENDS

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
    apertus,
    harmony,
    muse,
    auto,
)


@hookimpl
def mlx_tool_parsers() -> Iterable[ToolParser]:
    for module in MODULES:
        for parser in module.PARSERS:
            yield replace(parser, turn_ends=TURN_ENDS)


@hookimpl
def mlx_reasoning_parsers() -> Iterable[ReasoningParser]:
    for module in (harmony, muse):
        yield from module.REASONING_PARSERS
