"""The page of the checks names each of them, with its promise."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from mlx_provider.testing import pytest_plugin
from mlx_provider.testing.conformance import (
    drafters,
    families,
    kernels,
    loading,
    reasoning_parsers,
    tool_parsers,
)

PAGE = (Path(__file__).parents[2] / "docs" / "plugins" / "conformance.md").read_text("utf-8")
CHECKS = [
    *loading.CHECKS,
    *tool_parsers.CHECKS,
    *reasoning_parsers.CHECKS,
    *families.CHECKS,
    *families.ONCE,
    *drafters.CHECKS,
    *kernels.CHECKS,
    *kernels.ONCE,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_stands_on_the_page(check: object) -> None:
    assert f"\n| {check.name} | " in PAGE


def test_each_fixture_stands_on_the_page() -> None:
    source = inspect.getsource(pytest_plugin)
    fixtures = [name for name in vars(pytest_plugin) if name.startswith("mlx_")]
    assert len(fixtures) == source.count("@pytest.fixture")
    assert [name for name in fixtures if f"\n| `{name}` | " not in PAGE] == []
