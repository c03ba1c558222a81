"""Commands that plugins add to the command line."""

from collections.abc import Callable

import pytest
import typer
from typer.main import get_group

from mlx_provider.registry import PluginRegistry
from mlx_provider.registry.contents import names
from named_plugins import discover

Install = Callable[..., str]

COMMAND = """
from mlx_provider import hookimpl

@hookimpl
def mlx_register_commands(cli):
    @cli.command()
    def {name}(count: {kind} = 1) -> None: ...
    {after}
"""


def app() -> typer.Typer:
    cli = typer.Typer()

    @cli.command()
    def serve() -> None: ...

    return cli


def registered(registry: PluginRegistry) -> list[str]:
    cli = app()
    registry.register_commands(cli)
    return list(get_group(cli).commands)


def test_a_plugin_adds_commands_and_groups(install_plugin: Install) -> None:
    group = (
        "import typer; group = typer.Typer(); group.command()(lambda: None); "
        "cli.add_typer(group, name='toys')"
    )
    name = install_plugin("toy", COMMAND.format(name="say_hello", kind="int", after=group))
    registry = discover(name)
    assert registry.plugins[0].hooks == ("mlx_register_commands",)
    assert registered(registry) == ["serve", "say-hello", "toys"]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        pytest.param(
            COMMAND.format(name="a", kind="int", after="1 / 0"), "ZeroDivision", id="late"
        ),
        pytest.param(
            COMMAND.format(name="a", kind="int | str", after=""), "AssertionError", id="type"
        ),
        pytest.param(
            COMMAND.format(name="serve", kind="int", after=""),
            "PluginError: the command 'serve' exists already",
            id="taken",
        ),
    ],
)
def test_a_failing_plugin_adds_no_command(install_plugin: Install, source: str, error: str) -> None:
    names = [
        install_plugin("bad", source),
        install_plugin("good", COMMAND.format(name="fine", kind="int", after="")),
    ]
    registry = discover(*names)
    assert registered(registry) == ["serve", "fine"]
    (note,) = registry.plugins[0].notes
    assert note.startswith(f"its commands are left out: {error}")


def test_names_of_plugin_commands_equal_those_of_typer() -> None:
    cli, own, spread = app(), typer.Typer(name="own"), typer.Typer()

    @cli.command("other-name")
    def named() -> None: ...

    @cli.command()
    def Made_Of_Words() -> None: ...

    @spread.command()
    def spread_out() -> None: ...

    cli.add_typer(own)
    cli.add_typer(own, name="given")
    cli.add_typer(spread)
    assert names(cli) == get_group(cli).commands.keys()
    assert names(cli) == {"serve", "other-name", "made-of-words", "own", "given", "spread-out"}
