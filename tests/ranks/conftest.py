"""Groups of ranks, and models whose heads they can share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rank_group import launch as launched

Launch = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """`launch(script, ranks, *arguments)`: see `rank_group`."""

    def run(script: Path, ranks: int, *arguments: str) -> list[Any]:
        return launched(script, ranks, tmp_path_factory.mktemp("told"), *arguments)

    return run
