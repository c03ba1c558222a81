"""Loads one plugin, checks its records, and keeps those of one kind with their owners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import pluggy

from .. import hookspecs
from ..errors import BadRequest, PluginError
from ..records import (
    CallGrammar,
    Client,
    Drafter,
    Kernels,
    MessageGrammar,
    ModelFamily,
    ReasoningParser,
    TaggedArguments,
    ToolParser,
    UpstreamPatch,
)
from .discovery import Plugin, canonical, did_you_mean

if TYPE_CHECKING:
    import typer

PARTS: dict[object, type] = {
    "CallGrammar | None": CallGrammar,
    "MessageGrammar | None": MessageGrammar,
    "TaggedArguments | None": TaggedArguments,
}
"""Records within records, by the annotation of the field."""
R = TypeVar("R", bound=ModelFamily | ToolParser | ReasoningParser | Kernels | Drafter | Client)


class Kind(NamedTuple):
    hook: str
    name: str
    """For people."""
    called: tuple[str, ...]
    """Fields that the core calls, checked here rather than by the first request that needs them."""


KINDS: dict[type, Kind] = {
    ModelFamily: Kind("mlx_model_families", "model family", ("matches", "load")),
    ToolParser: Kind("mlx_tool_parsers", "tool parser", ("parse", "detect")),
    ReasoningParser: Kind("mlx_reasoning_parsers", "reasoning parser", ("detect",)),
    Kernels: Kind("mlx_kernels", "kernels", ("matches", "replacements")),
    Drafter: Kind("mlx_drafters", "drafter", ("refuses", "start")),
    Client: Kind("mlx_clients", "client", ("profile",)),
}


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) for text in value)


TEXTS: dict[object, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "text"),
    "str | None": (lambda value: isinstance(value, str | None), "text or None"),
    "tuple[str, ...]": (_are_texts, "a tuple of texts"),
    "tuple[str, str] | None": (
        lambda value: value is None or (_are_texts(value) and len(value) == 2),
        "two texts or None",
    ),
}
"""A test of a field's value, and the words for what is allowed, by the annotation of the field."""


def check_texts(record: Any, where: str) -> None:
    """Raise `PluginError` for a field that is not text, because it would fail during a reply."""
    for field in fields(record):
        value = getattr(record, field.name)
        if field.type in PARTS and value is not None:
            kind = PARTS[field.type]
            if not isinstance(value, kind):
                raise PluginError(f"{where}{field.name} is not a {kind.__name__}")
            check_texts(value, f"{where}{field.name}.")
        elif field.type in TEXTS:
            fits, wanted = TEXTS[field.type]
            if not fits(value):
                raise PluginError(f"{where}{field.name} is not {wanted}")
    if isinstance(record, CallGrammar) and "{name}" not in record.before:
        raise PluginError(f"{where}before does not hold {{name}}, the place of the tool's name")


@dataclass(frozen=True)
class Contents:
    """What one plugin brings."""

    manager: pluggy.PluginManager
    """Holds only this plugin, so that its hooks cannot affect another's."""
    api: int
    """The version of the plugin interface that it was written for."""
    hooks: tuple[str, ...]
    records: Mapping[type, tuple[Any, ...]]
    """By the keys of `KINDS`."""

    def of(self, kind: type[R]) -> tuple[R, ...]:
        return self.records[kind]

    @property
    def patches(self) -> tuple[UpstreamPatch, ...]:
        records = (*self.records[ModelFamily], *self.records[Kernels])
        return tuple(dict.fromkeys(patch for record in records for patch in record.patches))


def load(entry_point: EntryPoint) -> Contents:
    """Import a plugin and run its hooks. Raises any error of the plugin,
    `pluggy.PluginValidationError` for an unknown hook or argument, and `PluginError` for another
    API version, no hook at all or a wrong record."""
    module = entry_point.load()
    api = _api(module)
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(module, name=entry_point.name)
    manager.check_pending()
    hooks = tuple(sorted(caller.name for caller in manager.get_hookcallers(module) or ()))
    if not hooks:
        raise PluginError(f"{entry_point.value} implements no hook; is @hookimpl missing?")
    return Contents(manager, api, hooks, {kind: _records(manager, kind) for kind in KINDS})


def _api(module: Any) -> int:
    """The version that a plugin states. Raises `PluginError` if it is not supported."""
    wanted = getattr(module, "mlx_provider_api", hookspecs.API_VERSION)
    if type(wanted) is not int:
        raise PluginError(f"mlx_provider_api is {wanted!r}, not a whole number")
    known = f"written for plugin API {wanted}, this mlx-provider has {hookspecs.API_VERSION}"
    if wanted > hookspecs.API_VERSION:
        raise PluginError(f"{known}: update mlx-provider")
    if wanted < hookspecs.OLDEST_API:
        raise PluginError(f"{known}, and takes {hookspecs.OLDEST_API} or later: update the plugin")
    return wanted


def _records(manager: pluggy.PluginManager, kind: type) -> tuple[Any, ...]:
    found: list[Any] = []
    hook = KINDS[kind].hook
    for result in getattr(manager.hook, hook)():
        if not isinstance(result, Iterable):
            raise PluginError(f"{hook} returned {result!r}, not an iterable of {kind.__name__}")
        for record in result:
            _check(record, kind)
            if any(canonical(record.name) == canonical(other.name) for other in found):
                raise PluginError(f"{hook} yields {record.name!r} twice")
            found.append(record)
    return tuple(found)


def _check(record: Any, kind: type) -> None:
    hook, _, called = KINDS[kind]
    if not isinstance(record, kind):
        raise PluginError(f"{hook} yielded {type(record).__name__}, not {kind.__name__}")
    name = getattr(record, "name", None)
    if not isinstance(name, str) or not name:
        raise PluginError(f"{hook} yielded a {kind.__name__} without a name")
    where = f"{kind.__name__} {name!r}: "
    for field in called:
        if not callable(getattr(record, field)):
            raise PluginError(f"{where}{field} is not callable")
    if not isinstance(getattr(record, "rank", 0), int):
        raise PluginError(f"{where}rank is not a whole number")
    if isinstance(record, ModelFamily | Kernels):
        _check_patches(record.patches, where)
    if not isinstance(record, ModelFamily):
        check_texts(record, where)


def _check_patches(patches: object, where: str) -> None:
    if not isinstance(patches, tuple) or not all(isinstance(x, UpstreamPatch) for x in patches):
        raise PluginError(f"{where}patches is not a tuple of UpstreamPatch")
    for patch in patches:
        check_texts(patch, f"{where}patches: ")


class Catalog(Generic[R]):
    """The records of one kind, with the plugins that own them. A third party may replace a built-in
    record by one with the same name, but two third parties must not conflict."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._owned: dict[str, tuple[R, Plugin]] = {}

    def check(self, records: Sequence[R], plugin: Plugin) -> None:
        """Raise `PluginError` if one of these records would conflict. A third party's must not have
        a name or alias of another third party's, nor a built-in one that of another built-in."""
        for record in records:
            _, former = self._owned.get(canonical(record.name), (None, None))
            if former is not None and (plugin.built_in or not former.built_in):
                self._refuse(record.name, former, plugin)
            for other, owner in self._owned.values():
                if plugin.built_in == owner.built_in:
                    for name in _spellings(record) & _spellings(other):
                        self._refuse(name, owner, plugin)

    def _refuse(self, name: str, owner: Plugin, plugin: Plugin) -> None:
        raise PluginError(
            f"{self.kind} {name!r} is claimed by {owner} and by {plugin}; that of {owner} is used"
        )

    def add(self, records: Sequence[R], plugin: Plugin) -> dict[str, Plugin]:
        """Add records that `check` has passed. Returns the former owner of each replaced name."""
        former = ((record.name, self._owned.get(canonical(record.name))) for record in records)
        replaced = {name: owned[1] for name, owned in former if owned is not None}
        self._owned.update({canonical(record.name): (record, plugin) for record in records})
        return replaced

    def names(self) -> dict[str, R]:
        """Records by name, without aliases."""
        return {record.name: record for record, _ in self._owned.values()}

    def spellings(self) -> dict[str, R]:
        """Records by name and alias. Names precede aliases, third parties' ones built-in ones."""
        found = self.names()
        for record, _ in self.by_preference():
            for alias in getattr(record, "aliases", ()):
                if canonical(alias) not in self._owned:
                    found.setdefault(alias, record)
        return found

    def find(self, name: str, param: str) -> R:
        """The record with this name or alias. Raises `BadRequest` with similar names."""
        known = self.spellings()
        for spelling, record in known.items():
            if canonical(spelling) == canonical(name):
                return record
        installed = f"(installed: {', '.join(sorted(self.names())) or 'none'})"
        hint = " ".join(filter(None, (did_you_mean(name, known), installed)))
        raise BadRequest(f"no {self.kind} {name!r} is installed; {hint}", param=param)

    def by_preference(self) -> Iterator[tuple[R, Plugin]]:
        """Third parties' records first, then built-in ones, each in the order of loading."""
        yield from sorted(self._owned.values(), key=lambda owned: owned[1].built_in)


def _spellings(record: Any) -> set[str]:
    return {canonical(name) for name in (record.name, *getattr(record, "aliases", ()))}


def adopt(cli: typer.Typer, hooks: pluggy.HookRelay) -> None:
    """Add the commands of one plugin (`hooks`) to `cli`; on any error, none. They are built once on
    a separate app, so that a signature that typer cannot read fails here, not at `--help`. Raises
    `PluginError` for a name in use, and any error of the plugin."""
    import typer
    from typer.main import get_group

    scratch = typer.Typer()
    hooks.mlx_register_commands(cli=scratch)
    if not scratch.registered_commands and not scratch.registered_groups:
        return
    taken = sorted(get_group(scratch).commands.keys() & names(cli))
    if taken:
        raise PluginError(f"the command {taken[0]!r} exists already")
    cli.registered_commands += scratch.registered_commands
    cli.registered_groups += scratch.registered_groups


def names(app: typer.Typer) -> set[str]:
    """Names of an app's commands and groups, as `typer.main.get_group_from_info` (typer 0.29) finds
    them, but without building the commands, which takes time."""
    from typer.main import get_command_name, solve_typer_info_defaults

    found = {
        command.name or get_command_name(command.callback.__name__)
        for command in app.registered_commands
        if command.callback is not None
    }
    for group in app.registered_groups:
        name = solve_typer_info_defaults(group).name
        if name:
            found.add(name)
        elif group.typer_instance is not None:
            found |= names(group.typer_instance)
    return found
