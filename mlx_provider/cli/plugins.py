"""`mlx-provider new-plugin`: the folder of a working plugin, from which an author starts.

`mlx-provider parse`: what a parser reads in a reply, for plugin authors and bug reports.

`mlx-provider plugins`: installed plugins, what they provide, and which are broken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..errors import BadRequest
from ..installed import installed_version
from ..records import Kernels, ModelFamily, UpstreamPatch
from ..registry import Plugin, PluginRegistry
from ..registry.conformance import for_people, for_programs
from ..scaffold.writing import KINDS, Kind


def new_plugin(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name, such as my-format.")],
    family: Annotated[bool, typer.Option("--family", help=KINDS["family"].about)] = False,
    tool_parser: Annotated[
        bool, typer.Option("--tool-parser", help=KINDS["tool-parser"].about)
    ] = False,
    reasoning_parser: Annotated[
        bool, typer.Option("--reasoning-parser", help=KINDS["reasoning-parser"].about)
    ] = False,
    drafter: Annotated[bool, typer.Option("--drafter", help=KINDS["drafter"].about)] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help=KINDS["kernels"].about)] = False,
    folder: Annotated[Path, typer.Option(help="Where to create its folder.")] = Path(),
) -> None:
    """Write the folder of a new plugin: a working example of its kind, with tests that pass."""
    from ..scaffold import named, write_plugin

    kind = _one_kind(
        {
            "family": family,
            "tool-parser": tool_parser,
            "reasoning-parser": reasoning_parser,
            "drafter": drafter,
            "kernels": kernels,
        }
    )
    registry = PluginRegistry.of(context)
    plugin = named(name, kind, registry)
    files = write_plugin(plugin, kind, folder)
    for path in files:
        typer.echo(path)
    typer.echo(f"\nNext, in {folder / plugin.distribution}:")
    steps = _next_steps(plugin.name, plugin.module)
    width = max(len(command) for command, _ in steps)
    for command, reason in steps:
        typer.echo(f"  {command:<{width}}  # {reason}")


def _one_kind(asked: dict[str, bool]) -> Kind:
    """Raises `BadRequest` for none or several."""
    chosen = [option for option, is_asked in asked.items() if is_asked]
    options = ", ".join(f"--{option}" for option in KINDS)
    if not chosen:
        raise BadRequest(f"choose what the plugin provides: one of {options}", param="name")
    if len(chosen) > 1:
        given = " and ".join(f"--{option}" for option in chosen)
        raise BadRequest(f"{given}: choose one, and add the other hook later")
    return KINDS[chosen[0]]


def _next_steps(name: str, module: str) -> tuple[tuple[str, str], ...]:
    return (
        ("pip install -e . 'mlx-provider[testing]'", "the engine finds it; brings pytest"),
        ("pytest", "its tests pass as it is"),
        (f"$EDITOR {module}/__init__.py", "make it yours"),
        ("mlx-provider plugins", "what it brings, or why it is off"),
        ("python try_it.py", "a served answer"),
        (f"pytest --mlx-conformance {name}", "what every plugin of its kind must do"),
    )


LABEL_WIDTH = 18


def plugins(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the installed plugins with their hooks, records, errors and findings of checks."""
    registry = PluginRegistry.of(context)
    if as_json:
        summary = [asdict(each) | {"conformance": for_programs(each)} for each in registry.plugins]
        typer.echo(json.dumps(summary, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    if not registry.plugins:
        console.print("no plugins")
    for plugin in registry.plugins:
        console.print(_described(plugin, registry.model_families, registry.kernels))


def _described(
    plugin: Plugin, families: Mapping[str, ModelFamily], kernels: Mapping[str, Kernels]
) -> Text:
    text = Text(plugin.name, style="bold" if plugin.error is None else "bold red")
    text.append(f"  {plugin.distribution} {plugin.version}".rstrip(), style="not bold")
    lines = [("hooks", ", ".join(plugin.hooks))]
    lines += [(kind, ", ".join(names)) for kind, names in plugin.records.items()]
    own = plugin.records.get("model family", ())
    lines += [("serves", families[name].serves) for name in own if name in families]
    own = plugin.records.get("kernels", ())
    lines += [("serves", kernels[name].serves) for name in own if name in kernels]
    lines += [("replaces", _replaced(patch)) for patch in plugin.patches]
    lines.append(("conformance", for_people(plugin)))
    lines += [("note", note) for note in plugin.notes]
    lines.append(("error", plugin.error or ""))
    for label, content in lines:
        if content:
            style = "red" if label == "error" else "not bold"
            text.append(f"\n  {label:<{LABEL_WIDTH}}{content}", style=style)
    return text


def _replaced(patch: UpstreamPatch) -> str:
    """The replaced function, and the installed version if the patch is for another one."""
    distribution, _, read = patch.version.rpartition(" ")
    found = (installed_version(distribution) if distribution else "") or read
    here = "" if found == read else f" ({found} is installed)"
    return f"{patch.target} of {patch.version}{here}: {patch.reason}"
