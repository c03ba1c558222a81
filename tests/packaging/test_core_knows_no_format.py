"""The core names no tool format and no reasoning format, nor holds one's markers."""

import re
from pathlib import Path

import pytest

import mlx_provider_reasoning_parsers as reasoning_plugin
import mlx_provider_tool_parsers as tool_plugin

CORE = Path(__file__).parents[2] / "mlx_provider"
PARSERS = [
    *tool_plugin.mlx_tool_parsers(),
    *tool_plugin.mlx_reasoning_parsers(),
    *reasoning_plugin.mlx_reasoning_parsers(),
]
PLAIN = {"auto", "dots", "generic", "openai", "seed", "step", "think"}
"""Names that are also words of this field."""
NAMES = {name for parser in PARSERS for name in (parser.name, *parser.aliases)} - PLAIN
MARKERS = {marker for parser in PARSERS for marker in parser.visible() if len(marker) > 3}
NAMED = re.compile(rf"(?<![a-z])({'|'.join(map(re.escape, NAMES))})(?![a-z])", re.IGNORECASE)
MARKED = re.compile("|".join(map(re.escape, MARKERS)))
MODELS = {"bench", "testing"}
"""Rooms that build and measure models, whose chat templates have some format."""
FAMILIES = {"families", "upstream", *MODELS}
"""Rooms that meet model families, some of which have a format's name."""


def lines(exempt: set[str], pattern: re.Pattern[str]) -> list[str]:
    """Where the core matches, outside of some rooms."""
    found = []
    for path in sorted(CORE.rglob("*.py")):
        room = path.relative_to(CORE)
        if not exempt & {*room.parts, room.stem}:
            text = path.read_text(encoding="utf-8").splitlines()
            found += [f"{room}: {line.strip()}" for line in text if pattern.search(line)]
    return found


@pytest.mark.parametrize(
    ("exempt", "pattern"), [(FAMILIES, NAMED), (MODELS, MARKED)], ids=["names", "markers"]
)
def test_the_core_names_no_tool_format(exempt: set[str], pattern: re.Pattern[str]) -> None:
    assert lines(exempt, pattern) == []


def test_the_searched_format_names_and_markers_are_complete() -> None:
    assert {"hermes", "harmony", "pythonic", "glm45", "minimax"} <= NAMES
    assert {"<tool_call>", "[TOOL_CALLS]", "<|channel|>"} <= MARKERS
    assert NAMED.search("the Hermes format")
