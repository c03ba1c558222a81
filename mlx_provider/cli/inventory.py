"""Models and plugins of this machine: `pull`, `list`, `rm`, `doctor`, `plugins`, `new-plugin`."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..config import installed_version
from ..errors import BadRequest, MLXProviderError
from ..logs import format_size
from ..records import UpstreamPatch
from ..registry import Plugin, PluginRegistry
from ..scaffold import KINDS

Repository = Annotated[str, typer.Argument(help="OWNER/NAME or OWNER/NAME@REVISION on the Hub.")]
STYLES = {"fail": "bold red", "warn": "yellow", "note": "cyan", "ok": "green"}
LABEL_WIDTH = 18


def pull(context: typer.Context, model: Repository) -> None:
    """Download or update a model in the Hub cache. Continues an interrupted download."""
    from ..serving.hub import checkpoint, download, is_repository

    model = model.removeprefix("mlx/")
    if not is_repository(model):
        raise BadRequest(f"{model} is not a repository on the Hub: give OWNER/NAME", param="model")
    registry = PluginRegistry.of(context)
    registry.family_for(checkpoint(model).config)  # raises before gigabytes are downloaded
    folder = download(model)
    typer.echo(f"{model}: {format_size(checkpoint(model).weight_bytes)} of weights in {folder}")
    typer.echo(f"serve it: mlx-provider up {model}")


def show_models(context: typer.Context) -> None:
    """List the models in the Hub cache, with their sizes."""
    from ..serving.hub import cache_root, checkpoint, models_on_disk

    registry = PluginRegistry.of(context)
    found = models_on_disk()
    if not found:
        typer.echo(f"none yet; `demo` is part of this package; the Hub cache is {cache_root()}")
        return
    table = Table.grid(padding=(0, 2))
    for model in found:
        try:  # which family serves the model, or why none does
            config = {} if model.fault else checkpoint(model.name).config
            state = model.fault or f"family {registry.family_for(config)[0].name}"
        except MLXProviderError as error:
            state = error.message
        table.add_row(Text(model.name, overflow="fold"), Text(format_size(model.size)), Text(state))
    Console(highlight=False).print(table)
    total = format_size(sum(model.size for model in found))
    typer.echo(f"{total}; the Hub cache is {cache_root()}")


def rm(model: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub.")]) -> None:
    """Remove a model from the Hub cache."""
    from ..serving.hub import remove

    model = model.removeprefix("mlx/")
    typer.echo(f"{model} is removed, {format_size(remove(model))}")


def doctor(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A model: Hub id, folder, or `demo`.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Skip the test token, which needs an engine and a proxy."),
    ] = False,
) -> None:
    """Check this machine, and optionally a model. Exit code 0: no check fails."""
    from ..doctor import STATES, Subject, examine, healthy, json_fields

    registry = PluginRegistry.of(context)
    model = None if model is None else model.removeprefix("mlx/")
    subject = Subject(model, discover=lambda environ: registry)
    with Console(stderr=True).status("checking ..."):
        found = examine(subject, thorough=not quick)
    if as_json:
        typer.echo(json.dumps(json_fields(found, model=model, version=__version__), indent=2))
    else:
        console = Console(highlight=False)
        table = Table.grid(padding=(0, 2))
        for column in ({"no_wrap": True}, {"no_wrap": True}, {"overflow": "fold"}):
            table.add_column(**column)
        for finding in found:
            mark = Text(finding.state, style=STYLES[finding.state])
            table.add_row(mark, Text(finding.name, style="dim"), Text(finding.what))
            if finding.remedy:
                table.add_row("", "", Text(f"-> {finding.remedy}", style="bold"))
        console.print(table)
        count = Counter(finding.state for finding in found)
        hint = "" if model else "; name a model to examine it, too: `mlx-provider doctor demo`"
        counts = ", ".join(f"{count[state]} {state}" for state in STATES)
        console.print(f"\n{counts}{hint}")
    raise typer.Exit(0 if healthy(found) else 1)


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
    from ..scaffold import plugin_name, write_plugin

    flags = {
        "family": family,
        "tool-parser": tool_parser,
        "reasoning-parser": reasoning_parser,
        "drafter": drafter,
        "kernels": kernels,
    }
    chosen = [f"--{option}" for option, is_given in flags.items() if is_given]
    if len(chosen) != 1:
        several = f"{' and '.join(chosen)}: choose one, and add the other hook later"
        options = ", ".join(f"--{option}" for option in KINDS)
        none = f"choose what the plugin provides: one of {options}"
        raise BadRequest(several if chosen else none, param="name")
    kind = KINDS[chosen[0].removeprefix("--")]
    plugin = plugin_name(name, kind, PluginRegistry.of(context))
    for path in write_plugin(plugin, kind, folder):
        typer.echo(path)
    typer.echo(f"\nNext, in {folder / plugin.distribution}:")
    steps = {
        "pip install -e . '<clone>[testing]'": "<clone>: your clone of mlx-provider",
        "pytest": "its tests pass as it is",
        f"$EDITOR {plugin.module}/__init__.py": "change it to your format or model",
        "mlx-provider plugins": "what it brings, or why it is off",
        "python try_it.py": "a served answer",
        f"pytest --mlx-conformance {plugin.name}": "what every plugin of its kind must do",
    }
    width = max(map(len, steps))
    for command, reason in steps.items():
        typer.echo(f"  {command:<{width}}  # {reason}")


def plugins(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the installed plugins with their hooks, records and errors."""
    registry = PluginRegistry.of(context)
    if as_json:
        typer.echo(json.dumps([asdict(plugin) for plugin in registry.plugins], indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    if not registry.plugins:
        console.print("no plugins")
    for plugin in registry.plugins:
        console.print(_describe(plugin, registry))


def _describe(plugin: Plugin, registry: PluginRegistry) -> Text:
    text = Text(plugin.name, style="bold" if plugin.error is None else "bold red")
    text.append(f"  {plugin.distribution} {plugin.version}".rstrip(), style="not bold")
    lines = [("hooks", ", ".join(plugin.hooks))]
    lines += [(kind, ", ".join(names)) for kind, names in plugin.records.items()]
    for kind, known in (("model family", registry.model_families), ("kernels", registry.kernels)):
        names = plugin.records.get(kind, ())
        lines += [("serves", known[name].serves) for name in names if name in known]
    lines += [("replaces", _describe_patch(patch)) for patch in plugin.patches]
    lines += [("note", note) for note in plugin.notes]
    lines.append(("error", plugin.error or ""))
    for label, content in lines:
        if content:
            style = "red" if label == "error" else "not bold"
            text.append(f"\n  {label:<{LABEL_WIDTH}}{content}", style=style)
    return text


def _describe_patch(patch: UpstreamPatch) -> str:
    """One line, with the installed version if it is not the one whose source was read."""
    distribution, _, version_read = patch.version.rpartition(" ")
    installed = installed_version(distribution) if distribution else ""
    other = f" ({installed} is installed)" if installed not in ("", version_read) else ""
    return f"{patch.target} of {patch.version}{other}: {patch.reason}"
