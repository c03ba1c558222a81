"""Shared parts of the commands that serve a model through a gateway.

`mlx-provider init`: the files of a LiteLLM proxy for a model that fits this machine.

`mlx-provider up` and `down`: a gateway that runs in the background.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..errors import BadRequest, EngineUnavailable
from ..registry import PluginRegistry

if TYPE_CHECKING:
    from ..gateway.kept import Kept, Record
    from ..gateway.login_item import LoginItem


ContextTokens = Annotated[
    int | None,
    typer.Option("--context", min=256, help="Tokens of context. Default: what fits into memory."),
]


def show_step(phase: str, what: str) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text(f"{phase:<8}", style="dim"), Text(what), sep="")


def init(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Hub id, folder, or demo. Default: the best one here."),
    ] = None,
    tokens: ContextTokens = None,
    folder: Annotated[Path, typer.Option(help="Where the files are written.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write config.yaml and .env for a LiteLLM proxy. Downloads only the model's config."""
    from ..gateway.files import START, write_pair
    from ..gateway.models import chosen, device_memory, size

    registry = PluginRegistry.of(context)
    memory = device_memory()
    found = chosen(model, registry, memory, tokens)
    paths = write_pair(folder, found.served(), limited_by=found.limited_by, force=force)
    typer.echo(f"{found.summary}, family {found.family}; {size(memory)} for models")
    typer.echo(f"written: {', '.join(map(str, paths))}")
    where = "" if folder == Path() else f"cd {folder}; "
    typer.echo(f"start it: {where}{START}")


AT_LOGIN = "--at-login"


def up(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Hub id, folder, or demo. Default: the last one or the best one here."),
    ] = None,
    tokens: ContextTokens = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of the proxy. Default: the last one or 4100."),
    ] = None,
    at_login: Annotated[
        bool, typer.Option(AT_LOGIN, help="Start it again each time you log in.")
    ] = False,
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Replace the key. The old one is no longer valid.")
    ] = False,
) -> None:
    """Serve a model to every client of this machine, until `mlx-provider down`.

    Starts engine and LiteLLM proxy in the background. Prints what clients need, for the shell.
    """
    from ..gateway.foreground import Ended
    from ..gateway.kept import Kept
    from ..gateway.standing import start
    from ..serving.hub import full_name

    kept = Kept()
    kept.prepare()
    model = None if model is None else full_name(model)
    if new_key:
        if kept.running():
            raise BadRequest("the running gateway has the old key: run `mlx-provider down` first")
        kept.key(renew=True)
    try:
        record = _running(kept, model, tokens, port)
        while record is None:
            record = _record(context, kept, model, tokens, port)
            if not start(kept, record, os.environ, show_step):
                record = _running(kept, model, tokens, port)
    except Ended as ended:
        raise typer.Exit(128 + ended.number) from None
    if at_login:
        item = _login_item(kept)
        item.write()
        show_step("login", f"{item.path} starts it")
    key, new = kept.key()
    if new:  # the file was removed, or opened to others, while the gateway ran
        raise EngineUnavailable(
            f"{kept.key_file} holds a new key, which counts from the next start on: "
            "`mlx-provider down`, then `mlx-provider up`"
        )
    for line in _exports(record, key):
        typer.echo(line)
    show_step("stop", "mlx-provider down")


def down(
    at_login: Annotated[
        bool, typer.Option(AT_LOGIN, help="Also stop starting it at login.")
    ] = False,
) -> None:
    """Stop what `mlx-provider up` has started."""
    from ..gateway.kept import Kept
    from ..gateway.progress import end_idle_engine
    from ..gateway.standing import stop

    kept = Kept()
    kept.prepare()
    if running := kept.running():
        stop(kept, running, os.environ, show_step)
    else:
        show_step("proxy", "none runs that `mlx-provider up` has started")
        # a proxy that was killed leaves its engine, and so does an `up` that was interrupted
        alone = kept.record() is None
        show_step("engine", end_idle_engine(os.environ, "`mlx-provider down`", alone=alone))
    item = _login_item(kept)
    if at_login:
        show_step("login", f"{item.path} is {'removed' if item.remove() else 'not there'}")
    elif item.path.exists():
        show_step(
            "login", f"{item.path} starts it again: `mlx-provider down {AT_LOGIN}` removes that"
        )


def _running(kept: Kept, model: str | None, tokens: int | None, port: int | None) -> Record | None:
    """Waits until it answers. Raises `BadRequest` if another gateway is wanted."""
    from ..gateway.standing import await_ready

    running = kept.running()
    if running is None:
        return None
    record, served = running.record, running.record.served
    asked, has = (model, tokens, port), (served.model, served.context, record.port)
    if any(one is not None and one != other for one, other in zip(asked, has, strict=True)):
        raise BadRequest(
            f"a gateway already serves {served.model} (context {served.context:,}) at "
            f"{record.url}: end it with `mlx-provider down`, then run this again"
        )
    await_ready(kept, running)
    show_step("runs", f"process {running.pid}, {served.model}")
    return record


def _record(
    context: typer.Context, kept: Kept, model: str | None, tokens: int | None, port: int | None
) -> Record:
    """Unset values are those of the last time."""
    from ..gateway.kept import PORT, Record
    from ..gateway.models import chosen, device_memory
    from ..serving.hub import folder_of

    last = kept.record()
    port = port or (last.port if last else PORT)
    if last and tokens is None and model in (None, last.served.model):
        return Record(last.served, port)
    registry = PluginRegistry.of(context)
    memory = device_memory()
    found = chosen(model or (last.served.model if last else None), registry, memory, tokens)
    show_step("model", found.summary)
    if not found.here:
        folder_of(found.model)  # by this process, which shows the progress
        found = chosen(found.model, registry, memory, tokens)
    return Record(found.served(), port)


def _login_item(kept: Kept) -> LoginItem:
    from ..gateway.login_item import login_item

    return login_item(kept.folder / "login.log")


def _exports(record: Record, key: str) -> list[str]:
    return [
        f"# model {record.served.name}, context {record.served.context:,}; "
        "any other name leads to it, too",
        f"export OPENAI_BASE_URL={record.url}/v1",
        f"export OPENAI_API_KEY={key}",
        f"export ANTHROPIC_BASE_URL={record.url}",
        f"export ANTHROPIC_AUTH_TOKEN={key}",
    ]
