"""Warnings of a request as a header of its response."""

from __future__ import annotations

from collections.abc import Sequence

HEADER = "x-mlx-warnings"
LONGEST = 1000


def header_text(warnings: Sequence[str]) -> str:
    """Printable ASCII on one line, cut at `LONGEST`."""
    text = "; ".join(warnings)
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:LONGEST]
