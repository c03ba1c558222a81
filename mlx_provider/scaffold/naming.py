"""The names of a new plugin."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import BadRequest
from ..registry import PluginRegistry, canonical, installed
from .kinds import Kind

LONGEST = 40
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_PREFIX = re.compile(r"mlx[-_]provider[-_]", re.IGNORECASE)


@dataclass(frozen=True)
class PluginName:
    """One word for plugin, record, module and distribution."""

    name: str
    """Of the plugin and its record: `two_words`."""

    @property
    def module(self) -> str:
        """The package: `mlx_provider_two_words`."""
        return f"mlx_provider_{self.name}"

    @property
    def distribution(self) -> str:
        """The distribution and its folder: `mlx-provider-two-words`."""
        return self.module.replace("_", "-")


def named(given: str, kind: Kind, registry: PluginRegistry) -> PluginName:
    """A name that is not in use. Raises `BadRequest` with the remedy."""
    name = PluginName(_plain(given))
    for plugin, _ in installed():
        same = canonical(plugin.name) == canonical(name.name)
        if same or canonical(plugin.distribution) == canonical(name.distribution):
            raise BadRequest(
                f"{name.name!r} is the name of an installed plugin, {plugin}: choose another name, "
                "or uninstall that one first",
                param="name",
            )
    for plugin in registry.plugins:
        for record in plugin.records.get(kind.record, ()):
            if canonical(record) == canonical(name.name):
                raise BadRequest(
                    f"{kind.record} {record!r} is installed already, by {plugin}: choose another "
                    "name; to replace that one on purpose, name the record in the code so",
                    param="name",
                )
    return name


def _plain(given: str) -> str:
    """`mlx-provider-two-words` as `two_words`. Raises `BadRequest`."""
    name = _PREFIX.sub("", given, count=1).replace("-", "_")
    if not _NAME.fullmatch(name) or len(name) > LONGEST:
        raise BadRequest(
            f"{given!r} cannot name a plugin: take small letters, digits and single hyphens, a "
            f"letter first, {LONGEST} at most, such as my-format",
            param="name",
        )
    return name
