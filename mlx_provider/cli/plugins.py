"""`mlx-provider plugins`: installed plugins, what they provide, and which are broken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..installed import installed_version
from ..records import Kernels, ModelFamily, UpstreamPatch
from ..registry import Plugin, PluginRegistry
from ..registry.conformance import for_people, for_programs

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
