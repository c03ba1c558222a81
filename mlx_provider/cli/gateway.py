"""Engine and proxy for clients: `mlx-provider init`, `up`, `down` and `launch`."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..errors import BadRequest, EngineUnavailable
from ..logs import format_size
from ..records import Client
from ..registry import PluginRegistry
from ..registry.discovery import did_you_mean

if TYPE_CHECKING:
    from ..client.http import When
    from ..gateway.config import Served
    from ..gateway.persistent import GatewayFiles, Record

Model = Annotated[
    str | None, typer.Argument(help="Hub id, folder, or demo. Default: the best one here.")
]
ContextTokens = Annotated[
    int | None,
    typer.Option("--context", min=256, help="Tokens of context. Default: what fits into memory."),
]
CONSOLE = Console(stderr=True, highlight=False, soft_wrap=True)


def show_step(phase: str, what: str) -> None:
    CONSOLE.print(Text(f"{phase:<8}", style="dim"), Text(what), sep="")


def init(
    context: typer.Context,
    model: Model = None,
    tokens: ContextTokens = None,
    folder: Annotated[Path, typer.Option(help="Where the files are written.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write config.yaml and .env for a LiteLLM proxy. Downloads only the model's config."""
    from ..gateway.config import START, write_pair
    from ..gateway.models import choose, device_memory

    memory = device_memory()
    found = choose(model, PluginRegistry.of(context), memory, tokens)
    paths = write_pair(folder, found.served, force=force)
    typer.echo(f"{found.summary}, family {found.family}; {format_size(memory)} for models")
    typer.echo(f"written: {', '.join(map(str, paths))}")
    where = "" if folder == Path() else f"cd {folder}; "
    typer.echo(f"start it: {where}{START}")


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
) -> None:
    """Serve a model to every client of this machine, until `mlx-provider down`.

    Starts engine and LiteLLM proxy in the background. Prints what clients need, for the shell."""
    from ..gateway.persistent import GatewayFiles, start
    from ..serving.hub import full_name

    files = GatewayFiles()
    files.prepare()
    model = None if model is None else full_name(model)
    record = _running(files, model, tokens, port)
    while record is None:
        record = _record(context, files, model, tokens, port)
        if not start(files, record, os.environ, show_step):  # another process was first
            record = _running(files, model, tokens, port)
    key, new = files.key()
    if new:  # the file was removed, or opened to others, while the gateway ran
        raise EngineUnavailable(
            f"{files.key_file} holds a new key, which counts from the next start on: "
            "`mlx-provider down`, then `mlx-provider up`"
        )
    served, url = record.served, record.url
    typer.echo(
        f"# model {served.name}, context {served.context:,}; any other name leads to it, too\n"
        f"export OPENAI_BASE_URL={url}/v1\nexport OPENAI_API_KEY={key}\n"
        f"export ANTHROPIC_BASE_URL={url}\nexport ANTHROPIC_AUTH_TOKEN={key}"
    )
    show_step("stop", "mlx-provider down")


def down() -> None:
    """Stop what `mlx-provider up` has started."""
    from ..gateway.engine import end_when
    from ..gateway.persistent import GatewayFiles, stop

    files = GatewayFiles()
    files.prepare()
    if running := files.running():
        stop(files, running, os.environ, show_step)
    else:
        show_step("proxy", "none runs that `mlx-provider up` has started")
        # a proxy that was killed leaves its engine, and so does an `up` that was interrupted
        when: When = "alone" if files.record() is None else "idle"
        show_step("engine", end_when(os.environ, "`mlx-provider down`", when))


def _running(
    files: GatewayFiles, model: str | None, tokens: int | None, port: int | None
) -> Record | None:
    """What the running gateway serves, once it answers; `None`: none runs. Raises `BadRequest` if
    the user wants another model, context or port."""
    from ..gateway.persistent import await_ready

    running = files.running()
    if running is None:
        return None
    record, served = running.record, running.record.served
    asked, has = (model, tokens, port), (served.model, served.context, record.port)
    if any(one is not None and one != other for one, other in zip(asked, has, strict=True)):
        raise BadRequest(
            f"a gateway already serves {served.model} (context {served.context:,}) at "
            f"{record.url}: end it with `mlx-provider down`, then run this again"
        )
    await_ready(files, running)
    show_step("runs", f"process {running.pid}, {served.model}")
    return record


def _record(
    context: typer.Context,
    files: GatewayFiles,
    model: str | None,
    tokens: int | None,
    port: int | None,
) -> Record:
    """What to serve. Values that are unset are those of the last time."""
    from ..gateway.persistent import PORT, Record

    last = files.record()
    port = port or (last.port if last else PORT)
    if last and tokens is None and model in (None, last.served.model):
        return Record(last.served, port)
    model = model or (last.served.model if last else None)
    return Record(_choose(PluginRegistry.of(context), model, tokens), port)


def _choose(
    registry: PluginRegistry,
    model: str | None,
    tokens: int | None,
    client: Client | None = None,
    *,
    fetch: bool = True,
) -> Served:
    """`fetch`: also download it, with a progress bar. Raises like `gateway.models.choose`."""
    from ..gateway.models import choose, device_memory
    from ..serving.hub import folder_of

    memory = device_memory()
    found = choose(model, registry, memory, tokens, client)
    if fetch:
        show_step("model", found.summary)
        if not found.here:
            folder_of(found.served.model)
            found = choose(found.served.model, registry, memory, tokens, client)
    return found.served


def launch(
    context: typer.Context,
    client: Annotated[
        str | None, typer.Argument(help="The agent. Without it: the list of agents.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hub id, folder, or demo. Default: the best one here.")
    ] = None,
    tokens: ContextTokens = None,
    show: Annotated[
        bool, typer.Option("--print", help="Show environment, files and command; run nothing.")
    ] = False,
    direct: Annotated[
        bool, typer.Option("--direct", help="Connect to the engine without a LiteLLM proxy.")
    ] = False,
    as_subagent: Annotated[
        bool,
        typer.Option("--as-subagent", help="Keep the agent's main model; add a local subagent."),
    ] = False,
) -> None:
    """Run a coding agent on a local model. Arguments after `--` go to the agent.

    Starts engine and proxy if they do not run. The agent gets its own variables, and files in a
    folder that is removed afterwards. Your own settings of the agent are not written, and read only
    with --as-subagent."""
    from ..gateway.launch import Launch, executable

    registry = PluginRegistry.of(context)
    chosen = _client(client, registry)
    if direct and as_subagent and chosen.forwards:
        raise typer.BadParameter("its main model needs the proxy: leave out --direct")
    if not show:
        executable(chosen)  # fails before a model is downloaded
    # the first request of a subagent is smaller
    served = _choose(registry, model, tokens, None if as_subagent else chosen, fetch=not show)
    launched = Launch(
        chosen, served, context.args, dict(os.environ), direct, as_subagent=as_subagent
    )
    if show:
        for line in launched.preview():
            typer.echo(line)
        return
    raise typer.Exit(launched.run(show_step))


def _client(name: str | None, registry: PluginRegistry) -> Client:
    """Without a name, lists the known clients with the commands that install missing ones, and
    ends. Raises `BadRequest` for an unknown name, after the same list."""
    with suppress(BadRequest):
        if name is not None:
            return registry.client(name)
    lines = [
        f"{client.name:<10} {client.title}"
        + ("" if shutil.which(client.command) else f"  (not installed: {client.install})")
        for client in registry.clients.values()
    ]
    for line in lines or ["no client is installed as a plugin"]:
        CONSOLE.print(Text(line))
    if name is None:
        raise typer.Exit(2)
    hint = did_you_mean(name, registry.clients)
    raise BadRequest(f"no client {name!r} is known; {hint}".removesuffix("; "), param="client")
