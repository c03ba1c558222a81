"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_provider.errors import BadRequest

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def measured_of(result: Result) -> list[Result]:
    return [each for each in result["subjects"] if not each.get("skipped")]


def require_writable(folder: Path, option: str) -> None:
    """Raise `BadRequest` before a run, which can take an hour."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".written").touch()
        (folder / ".written").unlink()
    except OSError as error:
        raise BadRequest(f"{option} {folder}: {error.strerror}", param=option) from None
