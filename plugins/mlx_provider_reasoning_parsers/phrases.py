"""Formats whose markers are no think tags."""

from __future__ import annotations

from mlx_provider import ReasoningParser

GEMMA4 = ReasoningParser(
    name="gemma4",
    start="<|channel>",
    end="<channel|>",
    header="thought",
    detect=lambda template: "<|channel>" in template,
    calls=(("<|tool_call>", ""),),
    rank=2,
)
GRANITE = ReasoningParser(
    name="granite",
    start="Here is my thought process:",
    starts=("Here's my thought process:",),
    end="Here is my response:",
    ends=("Here's my response:",),
    detect=lambda template: "Here is my thought process:" in template,
    calls=(("<|tool_call|>", ""), ("<tool_call>", "")),
    rank=2,
)
NORTH = ReasoningParser(
    name="north",
    start="<|START_THINKING|>",
    end="<|END_THINKING|>",
    ends=("<|START_TEXT|>", "<|START_RESPONSE|>"),
    hidden=("<|END_TEXT|>", "<|END_RESPONSE|>"),
    unmarked="reasoning",
    detect=lambda template: "<|START_THINKING|>" in template,
    calls=(("<|START_ACTION|>", ""),),
    aliases=("cohere", "command_a", "cohere_command3", "cohere_command4"),
    rank=2,
)
PARSERS = (GEMMA4, GRANITE, NORTH)
