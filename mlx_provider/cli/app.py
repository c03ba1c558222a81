"""Assembles the commands. Our own errors are shown as one line, not as a traceback."""

from __future__ import annotations

import sys
from itertools import takewhile
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand

from .. import __version__
from ..errors import MLXProviderError
from ..registry import PluginRegistry
from ..upstream.quiet import quiet_transformers
from .cache import cache
from .chat import chat
from .demo import demo
from .doctor import doctor
from .engine import engine
from .init import init
from .launch import launch
from .metrics import metrics
from .models import pull, rm, show_models
from .new_plugin import new_plugin
from .plugins import plugins
from .serve import serve
from .top import top
from .up import down, up


def build(registry: PluginRegistry) -> typer.Typer:
    """The command line with the commands of every plugin. Run it with `obj=registry`."""
    cli = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
    cli.callback(invoke_without_command=True)(options)
    cli.command(cls=Command, context_settings={"allow_extra_args": True})(launch)
    for command in (
        up,
        down,
        pull,
        show_models,
        rm,
        init,
        demo,
        doctor,
        chat,
        serve,
        plugins,
        new_plugin,
        cache,
        top,
        metrics,
        parse,
    ):
        cli.command("list" if command is show_models else None, cls=Command)(command)
    cli.add_typer(engine, name="engine")
    registry.register_commands(cli)
    return cli


class Command(TyperCommand):
    """Names the right spelling where an argument is given as an option: `up --model NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = {f"--{each.name}" for each in self.params if each.param_type_name == "argument"}
        names -= {option for each in self.params for option in each.opts}
        given = list(takewhile(lambda word: word != "--", args))
        for place, word in enumerate(given):
            option, _, value = word.partition("=")
            if option in names:
                value = value or " ".join(given[place + 1 : place + 2]) or option[2:].upper()
                raise typer.BadParameter(f"no option {option}: `{ctx.command_path} {value}`", ctx)
        return super().parse_args(ctx, args)


def parse() -> None:
    """Read replies as JSON lines and write what the tool and reasoning parsers find in them.

    In: id, tool_parser or reasoning_parser (or both), chunks (pieces of one reply), and
    optionally tools, prompt_opened_think, stop. Out: id, content, reasoning_content,
    tool_calls with name and arguments; a line that cannot be read gives id and error.
    """
    # the wire types take a quarter of a second to import
    from .parse import parse as run

    run()


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


def options(
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
        from .front_door import show

        show(PluginRegistry.of(context))


def main() -> None:
    """Exit code 1 after one of our errors, 2 for wrong usage, 130 for Ctrl-C before a command has
    handlers of its own."""
    try:
        quiet_transformers()
        registry = PluginRegistry.discover()
        build(registry)(obj=registry)
    except KeyboardInterrupt:
        sys.exit(130)
    except MLXProviderError as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"error: {error.message}", style="red"))
        sys.exit(1)
