"""The tool-call formats of model families. Formats that write an address on every message (Harmony,
Muse) also have their reasoning parsers here, because one function reads both."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from mlx_provider import ReasoningParser, ToolParser, hookimpl

from . import auto, gemma, harmony, json_blocks, minicpm, pythonic, sections, tag_formats

mlx_provider_api = 1

FORMATS = (
    json_blocks.PARSERS,
    tag_formats.PARSERS,
    tag_formats.INVOKE_PARSERS,
    tag_formats.PAIR_PARSERS,
    sections.PARSERS,
    pythonic.PARSERS,
    gemma.PARSERS,
    minicpm.PARSERS,
    harmony.PARSERS,
    auto.MUSE_PARSERS,
    auto.PARSERS,
)
"""If several parsers of the highest rank detect a template, the first of them is chosen."""


@hookimpl
def mlx_tool_parsers() -> Iterable[ToolParser]:
    for parser in chain.from_iterable(FORMATS):
        yield replace(parser, turn_ends=auto.TURN_ENDS)


@hookimpl
def mlx_reasoning_parsers() -> Iterable[ReasoningParser]:
    yield from (*harmony.REASONING_PARSERS, *auto.REASONING_PARSERS)
