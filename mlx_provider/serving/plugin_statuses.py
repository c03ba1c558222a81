"""The status of this process's plugins in `/health`."""

from __future__ import annotations

from ..protocol.health import PluginStatus
from ..registry import Plugin, PluginRegistry
from ..registry.conformance import for_people, record_path


class PluginStatuses:
    """Conformance records are read again when they change. Safe from any thread."""

    def __init__(self, registry: PluginRegistry) -> None:
        self._registry = registry
        self._told: dict[str, tuple[int, str]] = {}
        """By plugin: modification time of its record (ns), and text."""

    def all(self) -> list[PluginStatus]:
        return [
            PluginStatus(
                name=plugin.name,
                distribution=plugin.distribution,
                version=plugin.version,
                in_use=plugin.error is None,
                conformance=self._conformance(plugin),
            )
            for plugin in self._registry.plugins
        ]

    def _conformance(self, plugin: Plugin) -> str:
        path = record_path(plugin.distribution, plugin.name)
        try:
            written = path.stat().st_mtime_ns
        except OSError:
            return ""
        known = self._told.get(plugin.key)
        if known is None or known[0] != written:
            known = self._told[plugin.key] = written, for_people(plugin)
        return known[1]
