"""Which distributions are installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version(distribution: str) -> str:
    """Empty: not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
