"""`mlx-provider top`: what the engine is doing, in the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from .engine_options import ApiBase, ApiKey, ApiKeyFile, finite, running_engine

if TYPE_CHECKING:
    from ..client.http import HttpClient


def top(
    once: Annotated[bool, typer.Option("--once", help="Show it once and exit.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON: a line for each update, or once."),
    ] = False,
    every: Annotated[
        float,
        typer.Option(min=0.2, max=60, callback=finite, help="Seconds between updates."),
    ] = 1.0,
    api_base: ApiBase = None,
    api_key_file: ApiKeyFile = None,
    api_key: ApiKey = None,
) -> None:
    """Watch requests, prompts, memory and prefix cache of a running engine. Starts no engine.

    Exit code 3: no engine runs.
    """
    client = running_engine(api_base, api_key_file, as_json=as_json)
    try:
        if once or not (as_json or Console().is_terminal):
            _once(client, as_json=as_json)
        elif as_json:
            _lines(client, every)
        else:
            _live(client, every)
    except KeyboardInterrupt:
        return
    finally:
        client.close()


def _once(client: HttpClient, *, as_json: bool) -> None:
    from .top_view import view

    figures = client.figures()
    if as_json:
        typer.echo(figures.model_dump_json(indent=2))
        return
    Console(highlight=False).print(view(figures))


def _lines(client: HttpClient, every: float) -> None:
    for line in client.watch(every):
        typer.echo(line)


def _live(client: HttpClient, every: float) -> None:
    from ..client.stream_connection import parse_figures
    from ..errors import EngineDied
    from .top_view import view

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            for line in client.watch(every):
                live.update(view(parse_figures(line)), refresh=True)
        except EngineDied:  # an expected end of the engine
            pass
    console.print(f"the engine has ended ({time.strftime('%H:%M:%S')})")
