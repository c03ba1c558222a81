"""Shows the current measurement."""

from datetime import UTC, datetime

import typer


def say(what: str) -> None:
    """Write a line with the time to stderr."""
    typer.echo(f"{datetime.now(UTC):%H:%M:%S} {what}", err=True)
