"""`mlx-provider engine`: the engine process of this machine and user."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..config import runtime
from ..errors import EngineUnavailable
from .engine_options import http_client

if TYPE_CHECKING:
    from ..client.http import HttpClient
    from ..protocol.messages import Health

engine = typer.Typer(no_args_is_help=True, help="The engine process of this machine and user.")
END_LIMIT = 30.0
"""Seconds in which an engine that was told to end at once must have ended."""


@engine.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What runs, with which models, and whether it is out of date. Starts nothing."""
    from ..client.identity import differences, identity

    health = _client().health()
    changed = differences(health.identity, identity())
    if as_json:
        typer.echo(json.dumps({**health.model_dump(), "out_of_date": changed}, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in described(health, changed):
        console.print(line, markup=False)


@engine.command()
def stop(
    idle: Annotated[bool, typer.Option("--idle", help="Wait until no request runs.")] = False,
) -> None:
    """End the engine; requests that run end with a typed error, unless --idle."""
    client = _client()
    pid = client.health().pid
    if not client.stop("`mlx-provider engine stop`", "idle" if idle else "now"):
        typer.echo(f"engine process {pid} ends as soon as no request runs")
        return
    _await_end(client)
    typer.echo(f"engine process {pid} has ended")


@engine.command()
def restart(
    idle: Annotated[bool, typer.Option("--idle", help="Only if no request runs.")] = False,
) -> None:
    """End the engine and start one with the plugins and settings of today."""
    from ..client.lifecycle import LocalEngine

    client = _client()
    try:
        ends = client.stop("`mlx-provider engine restart`", "idle" if idle else "now")
    except EngineUnavailable:
        ends = True
    if not ends:
        typer.echo("requests run: the engine ends when it is idle, the next request starts one")
        return
    _await_end(client)
    LocalEngine(runtime()).ensure()
    typer.echo(f"engine process {client.health().pid} runs")


@engine.command()
def logs(
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
) -> None:
    """Print the end of the engine's log."""
    path = runtime().log
    try:
        with path.open(errors="replace") as log:
            for line in deque(log, lines):
                typer.echo(line, nl=False)
            while follow:
                typer.echo(log.read(), nl=False)
                time.sleep(0.5)
    except FileNotFoundError:
        raise EngineUnavailable(f"there is no log at {path}: no engine was started here") from None
    except KeyboardInterrupt:
        return


def described(health: Health, changed: list[str]) -> list[str]:
    """The engine's state, a line for each thing."""
    lines = [
        f"process {health.pid}: mlx-provider {health.version} on {health.device}",
        f"BLAS: {health.blas}",
        f"requests: {health.running} run, {health.queued} wait",
        f"memory: {health.active_memory / 2**20:.0f} MiB",
        f"log: {runtime().log}",
    ]
    lines += [
        f"model {m.model}: {m.family} of plugin {m.plugin}, context {m.context_length}"
        for m in health.models
    ]
    lines += [f"decoding of {m.model}: {m.decoding}" for m in health.models]
    lines += [f"note of {m.model}: {note}" for m in health.models for note in m.notes]
    return [*lines, *(f"out of date: {each}" for each in changed)]


def _client() -> HttpClient:
    return http_client()


def _await_end(client: HttpClient) -> None:
    deadline = time.monotonic() + END_LIMIT
    while time.monotonic() < deadline:
        try:
            client.health()
        except EngineUnavailable:
            return
        time.sleep(0.1)
    raise EngineUnavailable(f"the engine does not end within {END_LIMIT:g} s: see {runtime().log}")
