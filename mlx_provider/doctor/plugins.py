"""Installed plugins, and those that serve the model."""

from __future__ import annotations

from collections.abc import Iterator

from .findings import Finding
from .subject import Subject


def installed(subject: Subject) -> Iterator[Finding]:
    """Working plugins, broken plugins, and their notes."""
    plugins = subject.registry.plugins
    for plugin in plugins:
        if plugin.error is not None:
            summary = f"plugin {plugin.name} is off: {plugin.error}"
            yield Finding(f"plugins.{plugin.name}", "fail", summary, _remedy(plugin.distribution))
        for note in plugin.notes:
            remedy = "see `mlx-provider plugins`; update the plugin or leave it out"
            yield Finding(f"plugins.{plugin.name}", "warn", f"{plugin.name}: {note}", remedy)
    working = ", ".join(plugin.name for plugin in plugins if plugin.error is None)
    if working:
        yield Finding("plugins.working", "ok", working)
    else:
        remedy = "unset MLX_PROVIDER_PLUGINS, or install mlx-provider anew"
        yield Finding("plugins.working", "fail", "no plugin works: nothing is served", remedy)


def family(subject: Subject) -> Iterator[Finding]:
    """The family that serves the model. Raises `UnsupportedModel`."""
    if not subject.config:
        return
    found, plugin = subject.registry.family_for(subject.config)
    summary = (
        f"family {found.name} of plugin {plugin.name} serves {subject.config.get('model_type')}"
    )
    yield Finding("model.family", "ok", summary)
    rivals = subject.registry.rivals(subject.config)
    if rivals:
        remedy = "uninstall one, or name the plugins that you want in MLX_PROVIDER_PLUGINS"
        yield Finding("model.family_claims", "warn", rivals, remedy)


def parsers(subject: Subject) -> Iterator[Finding]:
    """The formats in which the model writes calls and thoughts."""
    formats = subject.formats
    if formats is None:
        return
    if formats.template is None:
        summary = "the model has no chat template: only text completions are of use"
        remedy = "put the chat_template.jinja of the model's maker into its folder"
        yield Finding("model.formats", "fail", summary, remedy)
        return
    if formats.tool_parser is None:
        general = formats.any_parser.name if formats.any_parser else "nobody"
        summary = f"the chat template shows no known tool format: calls are read by {general}"
        remedy = "name one with model_info.mlx.tool_parser (`mlx-provider plugins` lists them)"
        yield Finding("model.tool_parser", "warn", summary, remedy)
    else:
        yield Finding("model.tool_parser", "ok", f"calls are read as {formats.tool_parser.name}")
    thoughts = formats.reasoning_parser
    summary = "the model shows no thoughts" if thoughts is None else f"thoughts are {thoughts.name}"
    yield Finding("model.reasoning_parser", "ok", summary)


def _remedy(distribution: str) -> str:
    if not distribution:
        return "take it out of MLX_PROVIDER_PLUGINS, or install it"
    return f"pip install --upgrade {distribution}, or pip uninstall {distribution}"
