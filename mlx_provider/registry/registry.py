"""Finds plugins, excludes broken ones, and selects the plugin for each use."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .. import hookspecs
from ..errors import PluginError, UnsupportedModel
from ..isolation import Fault, attempt
from ..logs import Trace
from ..records import (
    Client,
    Drafter,
    Kernels,
    ModelFamily,
    ReasoningParser,
    Replacement,
    ToolParser,
)
from .contents import KINDS, Catalog, Contents, R, adopt, load
from .discovery import SELECTION, Plugin, digest, find_plugins, selection

if TYPE_CHECKING:
    import pluggy
    import typer

log = logging.getLogger(__name__)
MATCHES_FAILED = "matches failed"
D = TypeVar("D", ToolParser, ReasoningParser)
V = TypeVar("V")


class PluginRegistry:
    """The plugins of this process. After `discover`, only notes are added."""

    def __init__(self) -> None:
        self._plugins: dict[str, Plugin] = {}
        self._managers: dict[str, pluggy.PluginManager] = {}
        self._catalogs = {kind: Catalog[Any](words) for kind, (_, words, _) in KINDS.items()}
        self._digests: dict[str, str] = {}

    @classmethod
    def discover(cls, environ: Mapping[str, str] = os.environ) -> PluginRegistry:
        """Load the installed plugins that `MLX_PROVIDER_PLUGINS` allows, built-in ones first. Never
        raises: a plugin that fails is listed with its error."""
        registry = cls()
        wanted = selection(environ)
        found = find_plugins()
        for plugin, entry_point in found:
            if wanted is None or plugin.name in wanted:
                registry._load(plugin, entry_point)
        for name in sorted((wanted or frozenset()) - {plugin.name for plugin, _ in found}):
            error = f"{SELECTION} names it, but no such plugin is installed"
            registry._plugins[name] = Plugin(name, "", "", error=error)
            log.warning("plugin %s: %s", name, registry._plugins[name].error)
        return registry

    @classmethod
    def of(cls, context: typer.Context) -> PluginRegistry:
        """The registry that a running command has already, else a new one."""
        return context.find_object(cls) or cls.discover()

    @property
    def plugins(self) -> list[Plugin]:
        """Every requested plugin, working or not, in load order."""
        return list(self._plugins.values())

    @property
    def model_families(self) -> dict[str, ModelFamily]:
        return self._of(ModelFamily).names()

    @property
    def kernels(self) -> dict[str, Kernels]:
        return self._of(Kernels).names()

    @property
    def clients(self) -> dict[str, Client]:
        return self._of(Client).names()

    def _of(self, kind: type[R]) -> Catalog[R]:
        return self._catalogs[kind]

    def sources(self, plugin: Plugin) -> str:
        """Digest of a third party's source files when it was loaded; empty: a built-in plugin."""
        return self._digests.get(plugin.key, "")

    def computing(self, family: Plugin) -> str:
        """Digests of the third parties' sources that KV depends on: of `family` and all kernels."""
        kernels = [plugin for plugin in self.plugins if plugin.records.get(self._of(Kernels).kind)]
        plugins = {plugin.key: plugin for plugin in (family, *kernels)}.values()
        return " ".join(filter(None, (self.sources(plugin) for plugin in plugins)))

    def register_commands(self, cli: typer.Typer) -> None:
        """Add plugins' commands. A plugin that raises or uses an existing name adds none."""
        for key, manager in self._managers.items():
            part = "its commands are left out"
            self._try(self._plugins[key], part, partial(adopt, cli, manager.hook), None)

    # ---- by name or alias; an unknown name raises `BadRequest`

    def client(self, name: str) -> Client:
        return self._of(Client).find(name, "client")

    def drafter(self, name: str) -> Drafter:
        return self._of(Drafter).find(name, "drafter")

    def tool_parser(self, name: str) -> ToolParser:
        return self._of(ToolParser).find(name, "tool_parser")

    def reasoning_parser(self, name: str) -> ReasoningParser:
        return self._of(ReasoningParser).find(name, "reasoning_parser")

    # ---- the best ones for a use; at equal rank, a third party's has precedence

    def automatic_drafters(self) -> list[Drafter]:
        """Drafters for an operator who names none, the highest rank (`automatic`) first."""
        found = [drafter for drafter, _ in self._of(Drafter).by_preference() if drafter.automatic]
        return sorted(found, key=lambda drafter: -drafter.automatic)

    def family_for(self, config: Mapping[str, Any]) -> tuple[ModelFamily, Plugin]:
        """The family with the highest priority for a `config.json`, and its plugin. If `matches`
        raises or returns no number, this is no match, and is noted on its plugin. Raises
        `UnsupportedModel` if no family matches."""

        def rank(family: ModelFamily) -> int | None:
            priority = int(family.matches(config))
            return priority if priority > 0 else None

        best = self._best(self._of(ModelFamily), MATCHES_FAILED, rank)
        if best is None:
            raise UnsupportedModel(self._no_family(config), param="model")
        family, owner = best
        return family, self._plugins[owner.key]

    def detect_tool_parser(self, template: str) -> ToolParser | None:
        """The parser for the format that a chat template uses; `None`: no parser knows it."""
        return self._detect(self._of(ToolParser), template)

    def detect_reasoning_parser(self, template: str) -> ReasoningParser | None:
        """Like `detect_tool_parser`, for thoughts."""
        return self._detect(self._of(ReasoningParser), template)

    def fallback_tool_parser(self, part: Literal["read", "write"]) -> ToolParser | None:
        """The parser to `read` or `write` calls if a template shows no known format, if any."""
        found = (p for p, _ in self._of(ToolParser).by_preference() if p.fallback == part)
        return max(found, key=lambda record: record.rank, default=None)

    def kernels_for(self, device: str, precision: str) -> tuple[str, list[Replacement]] | None:
        """Name and replacements of the kernels that match (`Kernels.matches`); `None`: none do. If
        kernels fail, this is noted on their plugin, and the next ones are tried."""
        preferred = sorted(self._of(Kernels).by_preference(), key=lambda owned: -owned[0].rank)
        for kernels, owner in preferred:
            if self._try_kernels(kernels, owner, partial(kernels.matches, device, precision)):
                found = self._try_kernels(kernels, owner, partial(_replacements, kernels))
                if found is not None:
                    return kernels.name, found
        return None

    def _load(self, plugin: Plugin, entry_point: EntryPoint) -> None:
        self._plugins[plugin.key] = plugin
        if not plugin.built_in:
            self._digests[plugin.key] = digest(entry_point)
        found = attempt(lambda: self._admit(plugin, load(entry_point)))
        if isinstance(found, Fault):
            self._plugins[plugin.key] = replace(plugin, error=found.summary)
            log.warning("plugin %s skipped: %s\n%s", plugin, found.summary, found.trace)

    def _admit(self, plugin: Plugin, contents: Contents) -> None:
        """Check everything, then commit: a plugin is added completely or not at all."""
        found = [(self._catalogs[kind], records) for kind, records in contents.records.items()]
        for catalog, records in found:
            catalog.check(records, plugin)
        named = {catalog.kind: tuple(r.name for r in records) for catalog, records in found}
        self._plugins[plugin.key] = replace(
            plugin, hooks=contents.hooks, records=named, patches=contents.patches
        )
        self._managers[plugin.key] = contents.manager
        for catalog, records in found:
            self._add(catalog, records, plugin)
        if contents.api < hookspecs.API_VERSION:
            versions = f"written for plugin API {contents.api}, this mlx-provider has"
            self._note(plugin.key, f"{versions} {hookspecs.API_VERSION}: update the plugin")

    def _add(self, catalog: Catalog[R], records: tuple[R, ...], plugin: Plugin) -> None:
        for name, owner in catalog.add(records, plugin).items():
            self._note(owner.key, f"{catalog.kind} {name!r} is replaced by {plugin}")

    def _try(self, owner: Plugin, part: str, call: Callable[[], V], otherwise: V) -> V:
        """What a plugin's code returns; if it raises, `otherwise`, with a note on `part`."""
        found = attempt(call)
        if not isinstance(found, Fault):
            return found
        self._note(owner.key, f"{part}: {found.summary}", Trace(f"\n{found.trace}"))
        return otherwise

    def _note(self, key: str, note: str, trace: str = "") -> None:
        plugin = self._plugins[key]
        if note not in plugin.notes:
            self._plugins[key] = replace(plugin, notes=(*plugin.notes, note))
            log.warning("plugin %s: %s%s", plugin, note, trace)

    def _try_kernels(self, kernels: Kernels, owner: Plugin, call: Callable[[], V]) -> V | None:
        return self._try(owner, f"kernels {kernels.name!r} failed", call, None)

    def _detect(self, catalog: Catalog[D], template: str) -> D | None:
        def rank(parser: D) -> int | None:
            return parser.rank if parser.detect(template) else None

        best = self._best(catalog, "detect failed", rank)
        return best[0] if best else None

    def _best(
        self, catalog: Catalog[R], failed: str, rank: Callable[[R], int | None]
    ) -> tuple[R, Plugin] | None:
        """The record of the highest rank; at equal rank, a third party's. `None`: no match."""
        ranks: dict[int, tuple[R, Plugin]] = {}
        for record, owner in catalog.by_preference():
            part = f"{catalog.kind} {record.name!r}: {failed}"
            ranked = self._try(owner, part, partial(rank, record), None)
            if ranked is not None:
                ranks.setdefault(ranked, (record, owner))
        return ranks[max(ranks)] if ranks else None

    def _no_family(self, config: Mapping[str, Any]) -> str:
        families = ", ".join(sorted(self.model_families)) or "none"
        message = (
            f"no installed model family serves model_type {config.get('model_type')!r} "
            f"(installed: {families}); a plugin can add one with the hook mlx_model_families"
        )
        off = ", ".join(plugin.name for plugin in self.plugins if plugin.error is not None)
        failed = [f"{p.name}: {n}" for p in self.plugins for n in p.notes if MATCHES_FAILED in n]
        message += f"; plugins that failed to load: {off}" if off else ""
        return message + (f"; plugins that failed at it: {', '.join(failed)}" if failed else "")


def _replacements(kernels: Kernels) -> list[Replacement]:
    found = list(kernels.replacements())
    if odd := [type(made).__name__ for made in found if not isinstance(made, Replacement)]:
        raise PluginError(f"replacements gave {odd[0]}, not Replacement")
    return found
