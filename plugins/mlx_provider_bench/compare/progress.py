"""What is being measured, for whoever waits."""

from __future__ import annotations

from datetime import UTC, datetime

import typer


def say(what: str) -> None:
    """A line on stderr with the time."""
    typer.echo(f"{datetime.now(UTC):%H:%M:%S} {what}", err=True)
