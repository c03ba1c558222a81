"""Assembles the commands. Without one, `mlx-provider` shows the state of this machine and the next
steps. Our own errors are shown as one line, not as a traceback."""

import json
import shutil
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from .. import __version__
from ..config import runtime
from ..errors import MLXProviderError
from ..registry import PluginRegistry
from ..upstream.runtime import quiet_transformers
from .demo import chat, demo
from .engine import engine, serve
from .gateway import down, init, launch, up
from .inventory import doctor, new_plugin, plugins, pull, rm, show_models
from .top import cache, metrics, top

MAX_LISTED = 5
COMMAND_WIDTH = 44
NO_MODEL = "none downloaded yet; `demo` is part of this package"


def show_overview(registry: PluginRegistry) -> None:
    """The state of this machine and next steps. Imports nothing heavy if no engine runs."""
    from ..gateway.models import recommend_two, recommended_models, this_machine
    from ..serving.hub import cached_models

    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"mlx-provider {__version__}: local MLX models behind LiteLLM\n"))
    installed = [name for name, client in registry.clients.items() if shutil.which(client.command)]
    for name, summary in {
        "engine": _engine(),
        "models": _list_names(sorted(cached_models()), NO_MODEL),
        "gateway": _gateway() or "does not run; `mlx-provider up` starts it",
        "agents": _list_names(installed, "none; `mlx-provider launch` says how to install one"),
    }.items():
        console.print(Text(f"{name:<8}", style="dim"), Text(summary), sep="")
    machine, (day, models) = this_machine(), recommended_models()
    label = f"{machine.chip}, {machine.memory / 1e9:.0f} GB"
    console.print(Text(f"\nmodels for {label} (as of {day})", style="bold"))
    for model in recommend_two(machine, models):
        console.print(Text(f"  mlx-provider up {model.name}"))
        console.print(Text(f"    {model.weights / 1e9:.1f} GB: {model.why}", style="dim"))
    console.print(Text("\nnext", style="bold"))
    for command, summary in {
        f"mlx-provider launch {next(iter(installed), 'AGENT')}": "a coding agent on a local model",
        "mlx-provider up": "a model for every client of this machine, until `down`",
        "mlx-provider init": "config.yaml and .env of a LiteLLM proxy",
        "mlx-provider demo": "all of it at work, with a model of a few MB",
        "mlx-provider --help": "every command",
    }.items():
        console.print(Text(f"  {command:<{COMMAND_WIDTH}}"), Text(summary, style="dim"))


def _engine() -> str:
    if not runtime().listens():
        return "does not run; the first request starts it"
    from ..client.connection import connect

    try:
        health = connect().health()
    except MLXProviderError as error:
        return f"does not answer: {error.message}"
    models = [f"{model.model} (context {model.context_length:,})" for model in health.models]
    return f"process {health.pid} runs, with {_list_names(models, 'no model yet')}"


def _gateway() -> str:
    from ..gateway.persistent import GatewayFiles

    try:
        running = GatewayFiles().running()
    except MLXProviderError as error:
        return error.message
    if running is None:
        return ""
    served = running.record.served
    return f"serves {served.model} (context {served.context:,}) at {running.record.url}"


def _list_names(names: list[str], if_empty: str) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more if names else if_empty


def build(registry: PluginRegistry) -> typer.Typer:
    """The command line with the commands of every plugin. Call it with `obj=registry`."""
    cli = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
    cli.callback(invoke_without_command=True)(run_without_command)
    cli.command(context_settings={"allow_extra_args": True})(launch)
    cli.command("list")(show_models)
    commands = (up, down, pull, rm, init, demo, doctor, chat, serve, plugins, new_plugin, cache)
    for command in (*commands, top, metrics, parse):
        cli.command()(command)
    cli.add_typer(engine, name="engine")
    registry.register_commands(cli)
    return cli


def parse(context: typer.Context) -> None:
    """Read replies as JSON lines and write what the tool and reasoning parsers find in them.

    In: id, tool_parser or reasoning_parser (or both), chunks (pieces of one reply), and
    optionally tools, prompt_opened_think, stop, response_format. Out: id, content,
    reasoning_content, tool_calls with name and arguments, and with response_format parsed, valid
    and violated; a line that cannot be read gives id and error."""
    # imported here, because the wire types take a quarter of a second
    from .parse import parse_lines

    if sys.stdin.isatty():
        sys.stderr.write("reading JSON lines from the terminal; Ctrl-D ends\n")
    for answer in parse_lines(sys.stdin, PluginRegistry.of(context)):
        typer.echo(json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace"))


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(__version__)
        raise typer.Exit


def run_without_command(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Local MLX models behind LiteLLM. Without a command, shows what to do next on this machine."""
    if context.invoked_subcommand is None:
        show_overview(PluginRegistry.of(context))


def main() -> None:
    """Exit code 1 after one of our errors, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        quiet_transformers()
        registry = PluginRegistry.discover()
        build(registry)(obj=registry)
    except KeyboardInterrupt:
        sys.exit(130)
    except MLXProviderError as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"error: {error.message}", style="red"))
        sys.exit(1)
