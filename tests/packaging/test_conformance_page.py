"""The page of the checks names each of them, with its promise."""

from pathlib import Path

import pytest

from mlx_provider.testing.conformance import PLUGIN_CHECKS, checkpoint, models, parsers

PAGE = (Path(__file__).parents[2] / "docs" / "plugins" / "conformance.md").read_text("utf-8")
CHECKS = [
    *(*PLUGIN_CHECKS, *parsers.TOOL_CHECKS, *parsers.REASONING_CHECKS),
    *(checkpoint, *models.CHECKS),
]
NAMES = [check.__name__.replace("_", " ") for check in CHECKS]


@pytest.mark.parametrize("check", dict.fromkeys(NAMES))
def test_the_conformance_page_lists_every_check(check: str) -> None:
    assert f"\n| {check} | " in PAGE
