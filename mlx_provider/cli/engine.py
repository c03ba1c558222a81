"""`mlx-provider serve` and `engine`, and the options of every command that talks to an engine."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..config import PREFIX, runtime
from ..errors import EngineUnavailable, OtherProtocol

if TYPE_CHECKING:
    from ..client.http import HttpClient
    from ..protocol.health import Health

NONE_RUNS = 3  # exit code if no engine runs

ApiBase = Annotated[
    str | None,
    typer.Option(help="http://host:port or unix:/path of an engine. Default: this machine's."),
]
ApiKeyFile = Annotated[
    Path | None, typer.Option(help=f"File with the engine's key. Default: {PREFIX}API_KEY.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
engine = typer.Typer(no_args_is_help=True, help="The engine process of this machine and user.")


def client_of_running(
    api_base: str | None = None,
    file: Path | None = None,
    *,
    as_json: bool = False,
    err: bool = False,
) -> HttpClient:
    """A client of the engine. If none runs on this machine, ends with exit code 3 and a message,
    on stderr if `err` (stdout is for a program). Raises `EngineUnavailable` or `BadRequest`."""
    from ..client.connection import connect
    from ..client.runtime_folder import why_none_runs

    if api_base is None and (why := why_none_runs(runtime())):
        typer.echo(json.dumps({"engine": "none", "detail": why}) if as_json else why, err=err)
        raise typer.Exit(NONE_RUNS)
    return connect(api_base, api_key_of(file))


def api_key_of(file: Path | None) -> str | None:
    """The key in the file, else in the environment; `None`: there is none. Raises `BadRequest`."""
    from ..server.access import read_key

    return read_key(file) if file is not None else os.environ.get(PREFIX + "API_KEY") or None


def finite(value: float) -> float:
    """Refuse infinity and NaN, which an option's bounds do not exclude."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; with --port alone, 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; with --host alone, 8080.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key that clients must send, or lines NAME KEY for several tenants; "
            f"else {PREFIX}API_KEY is taken, else one is made and kept."
        ),
    ] = None,
    drain: Annotated[
        float,
        typer.Option(
            min=0,
            callback=finite,
            help="Seconds that running requests get when it is told to stop, while new ones "
            "are refused; a second signal ends it at once. With --host or --port.",
        ),
    ] = 0.0,
) -> None:
    """Run the engine, by default on this user's socket.

    With --host or --port, other machines can use it: their LiteLLM config names `api_base` and key.
    """
    from ..client.connection import ENGINE_COMMAND

    given = {"host": host, "port": port, "api-key-file": api_key_file, "drain": drain or None}
    set_options = {f"--{name}": str(value) for name, value in given.items() if value is not None}
    options = [word for option in set_options.items() for word in option]
    os.execv(ENGINE_COMMAND[0], [*ENGINE_COMMAND, *options])  # this process becomes the engine


@engine.command()
def status(
    as_json: AsJson = False, api_base: ApiBase = None, api_key_file: ApiKeyFile = None
) -> None:
    """Show the running engine, its models, and what differs from this shell. Starts nothing.

    Exit code 0: it runs; 1: it does not answer, or has a problem; 3: no engine runs."""
    from ..client.runtime_folder import differences, identity

    client = client_of_running(api_base, api_key_file, as_json=as_json)
    health = _health(client, own=api_base is None)
    other = list(differences(health.identity, identity()).values())
    if as_json:
        report = {"engine": "runs", **health.model_dump(), "other_settings": other}
        typer.echo(json.dumps(report, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for line in _describe(health, other, api_base):
            console.print(line, markup=False)
    if not health.ok:
        raise typer.Exit(1)


@engine.command("restart", short_help="As stop: the next request starts an engine.")
@engine.command()
def stop(
    idle: Annotated[bool, typer.Option("--idle", help="End it when no request runs.")] = False,
) -> None:
    """Stop the engine. Running requests fail; with --idle, this returns and it ends after them.

    The next request starts one with the plugins and settings of its sender."""
    from ..client.connection import connect
    from ..client.runtime_folder import why_none_runs
    from ..gateway.engine import end_when

    if why := why_none_runs(runtime()):
        typer.echo(why)
        return
    with suppress(OtherProtocol):  # such an engine can still be told to end
        _health(connect())  # its errors say more than those of `end_when`
    happens = end_when(os.environ, "`mlx-provider engine stop`", "idle" if idle else "now")
    typer.echo(f"engine {happens}")


@engine.command()
def logs(
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Number of lines.")] = 50,
) -> None:
    """Print the last lines of the engine's log."""
    from ..client.runtime_folder import open_own_file

    path = runtime().log
    if not path.exists():
        client_of_running()  # ends the command if none runs
        raise EngineUnavailable(f"there is no log at {path}: the engine writes to its terminal")
    with os.fdopen(open_own_file(path, os.O_RDONLY), errors="replace") as log:
        for text in deque(log, lines):
            typer.echo(text, nl=False)


def _describe(health: Health, other: list[str], api_base: str | None = None) -> list[str]:
    from ..serving.measurements import decoding

    output = f"where {api_base or 'it'} was started, on its error output"
    log = output if api_base or not runtime().log.exists() else runtime().log
    lines = [
        f"process {health.pid}: mlx-provider {health.version} on {health.device}",
        f"BLAS: {health.blas}",
        f"requests: {health.running} running, {health.queued} waiting",
        f"memory: {health.active_memory / 2**20:.0f} MiB",
        f"log: {log}",
    ]
    if not health.ok:
        lines.append(f"it has died: {health.detail}; `mlx-provider engine restart`")
    elif health.detail:
        lines.append(f"loading: {health.detail}")
    for m in health.models:
        context = f"context {m.context_length}"
        lines.append(f"model {m.model}: {m.family} of plugin {m.plugin}, {context}")
        lines.append(f"decoding of {m.model}: {decoding(m)}")
        lines += [f"note of {m.model}: {note}" for note in m.notes]
    return [*lines, *(f"other than this shell: {setting}" for setting in other)]


def _health(client: HttpClient, *, own: bool = True) -> Health:
    from ..client.runtime_folder import holder

    here = runtime()
    try:
        return client.health()
    except EngineUnavailable as error:
        if not own or type(error) is not EngineUnavailable:
            raise
        pid = holder(here.lock)
        raise EngineUnavailable(
            f"engine process {pid} does not answer: it is starting or ending; else see {here.log} "
            f"and `kill {pid}` ({error.message})"
        ) from None
