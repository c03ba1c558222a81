"""`mlx-provider launch`: a coding agent on a local model, with nothing to configure."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..errors import BadRequest
from ..records import Client
from ..registry import PluginRegistry
from ..registry.discovery import near
from .up import ContextTokens, show_step

if TYPE_CHECKING:
    from ..gateway.models import Candidate

DEMO = "demo"


def launch(
    context: typer.Context,
    client: Annotated[
        str | None, typer.Argument(help="The agent. Default: a menu, in a terminal.")
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
    with --as-subagent.
    """
    from ..gateway.foreground import Ended
    from ..gateway.profile import executable
    from ..gateway.session import Launch

    registry = PluginRegistry.of(context)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    chosen = _client(client, registry, console) if client else _asked_client(registry, console)
    if direct and as_subagent and chosen.forwards:
        raise typer.BadParameter("its main model needs the proxy: leave out --direct")
    if not show:
        executable(chosen)  # fails before the user is asked for a model
    found = _model(chosen, registry, model, tokens, console, as_subagent=as_subagent)
    launched = Launch(
        chosen, found.served(), context.args, dict(os.environ), direct, as_subagent=as_subagent
    )
    if show:
        for line in launched.preview():
            typer.echo(line)
        return
    show_step("model", found.summary)
    if not found.here:
        launched = replace(launched, served=_downloaded(found, registry, tokens).served())
    try:
        code = launched.run(show_step)
    except Ended as ended:
        code = 128 + ended.number
    raise typer.Exit(code)


def _client(name: str, registry: PluginRegistry, console: Console) -> Client:
    """For another name, shows the known clients and raises `BadRequest`."""
    try:
        return registry.client(name)
    except BadRequest:
        for line in _listed(registry):
            console.print(Text(line))
        like = near(name, registry.clients)
        hint = f"; did you mean {' or '.join(map(repr, like))}?" if like else ""
        raise BadRequest(f"no client {name!r} is known{hint}", param="client") from None


def _listed(registry: PluginRegistry) -> list[str]:
    """Lines for people, with the command that installs a missing one."""
    return [f"{each.name:<10} {each.serves}{_missing(each)}" for each in registry.clients.values()]


def _asked_client(registry: PluginRegistry, console: Console) -> Client:
    clients, lines = list(registry.clients.values()), _listed(registry)
    if not sys.stdin.isatty():
        for line in lines or ["no client is installed as a plugin"]:
            console.print(Text(line))
        raise typer.Exit(2)
    return clients[_picked(lines, "which client", console)]


def _missing(client: Client) -> str:
    from ..gateway.profile import is_installed

    return "" if is_installed(client) else f"  (not installed: {client.install})"


def _model(
    client: Client,
    registry: PluginRegistry,
    model: str | None,
    tokens: int | None,
    console: Console,
    *,
    as_subagent: bool,
) -> Candidate:
    """Raises an error with the sizes if the model does not fit."""
    from ..gateway.models import (
        automatic,
        candidate,
        device_memory,
        require_fit,
        require_prompt_fits,
    )

    memory = device_memory()
    if model is None and sys.stdin.isatty() and sys.stderr.isatty():
        model = _asked_model(registry, memory, console)
    found = (
        automatic(registry, memory, tokens)
        if model is None
        else candidate(model, registry, memory, tokens)
    )
    if not as_subagent:  # its first request is smaller
        require_prompt_fits(found, client)
    require_fit(found, memory, tokens)
    return found


def _downloaded(found: Candidate, registry: PluginRegistry, tokens: int | None) -> Candidate:
    """Downloads in this process, which shows the progress; then examines it again."""
    from ..gateway.models import candidate, device_memory
    from ..serving.hub import folder_of

    folder_of(found.model)
    return candidate(found.model, registry, device_memory(), tokens)


def _asked_model(registry: PluginRegistry, memory: int, console: Console) -> str:
    from ..gateway.models import candidates_here, recommended, size

    here = candidates_here(registry, memory)
    names = [each.model for each in here]
    lines = [each.summary for each in here]
    for name, weights in recommended(registry, memory).items():
        if name not in names:
            names.append(name)
            lines.append(f"{name}: about {size(weights)}, to be downloaded")
    names.append(DEMO)
    lines.append(f"{DEMO}: part of this package, a few MB; shows that it works, no more")
    console.print(Text(f"{size(memory)} of memory for models", style="dim"))
    return names[_picked(lines, "which model", console)]


def _picked(lines: list[str], question: str, console: Console) -> int:
    """Index of the line that the user selects by number; return selects the first."""
    for number, line in enumerate(lines, 1):
        console.print(Text(f"{number:>3}  {line}"))
    while True:
        try:
            typed = console.input(f"{question}? [1] ").strip() or "1"
        except (EOFError, KeyboardInterrupt):
            raise typer.Exit(130) from None
        if typed.isdigit() and 1 <= int(typed) <= len(lines):
            return int(typed) - 1
        console.print(Text(f"a number from 1 to {len(lines)}", style="dim"))
