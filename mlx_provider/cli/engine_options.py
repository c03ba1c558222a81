"""Options of every command that talks to an engine."""

from typing import Annotated

import typer

from ..config import PREFIX

ApiBase = Annotated[
    str | None,
    typer.Option(help="http://host:port or unix:/path of an engine; else the one of this machine."),
]
ApiKey = Annotated[str | None, typer.Option(envvar=PREFIX + "API_KEY", help="The engine's key.")]
