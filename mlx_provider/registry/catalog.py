"""Records of one kind, each with the plugin that yields it.

Adds a plugin's commands to the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import typer
from typer.main import get_command_name, get_group, solve_typer_info_defaults

from ..errors import BadRequest, PluginError
from ..records import Client, Drafter, Kernels, ModelFamily, ReasoningParser, ToolParser
from .discovery import Plugin, canonical, near

if TYPE_CHECKING:
    import pluggy


R = TypeVar("R", ModelFamily, ToolParser, ReasoningParser, Kernels, Drafter, Client)


class Catalog(Generic[R]):
    """A third party may replace a built-in record, but two third parties must not conflict."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        """For people: `model family`, `tool parser`, `reasoning parser`, `kernels`, `drafter`,
        `client`."""
        self._owned: dict[str, tuple[R, Plugin]] = {}

    def check(self, records: Sequence[R], plugin: Plugin) -> None:
        """Raise `PluginError` if a record's name, or a third party's alias, belongs to another
        plugin."""
        for record in records:
            owned = self._owned.get(canonical(record.name))
            if owned is not None and (not owned[1].ours or plugin.ours):
                self._refuse(record.name, owned[1], plugin)
            for other, owner in self._owned.values():
                if plugin.ours == owner.ours:
                    for name in _spellings(record) & _spellings(other):
                        self._refuse(name, owner, plugin)

    def _refuse(self, name: str, owner: Plugin, plugin: Plugin) -> None:
        raise PluginError(
            f"{self.kind} {name!r} is claimed by {owner} and by {plugin}; that of {owner} is used"
        )

    def add(self, records: Sequence[R], plugin: Plugin) -> dict[str, Plugin]:
        """Return the former owner of each name that was replaced."""
        replaced = {
            r.name: self._owned[canonical(r.name)][1]
            for r in records
            if canonical(r.name) in self._owned
        }
        self._owned.update({canonical(record.name): (record, plugin) for record in records})
        return replaced

    def names(self) -> dict[str, R]:
        return {record.name: record for record, _ in self._owned.values()}

    def spellings(self) -> dict[str, R]:
        """Records by name and alias. A name has precedence over an alias, a third party's alias
        over a built-in one."""
        found = self.names()
        for record, _ in self.preferred():
            for alias in getattr(record, "aliases", ()):
                if canonical(alias) not in self._owned:
                    found.setdefault(alias, record)
        return found

    def named(self, name: str, param: str) -> R:
        """Raises `BadRequest`, with similar names."""
        known = self.spellings()
        for spelling, record in known.items():
            if canonical(spelling) == canonical(name):
                return record
        like = near(name, known)
        hint = f"did you mean {' or '.join(map(repr, like))}? " if like else ""
        installed = ", ".join(sorted(self.names())) or "none"
        raise BadRequest(
            f"no {self.kind} {name!r} is installed; {hint}(installed: {installed})", param=param
        )

    def preferred(self) -> Iterator[tuple[R, Plugin]]:
        yield from sorted(self._owned.values(), key=lambda owned: owned[1].ours)


def _spellings(
    record: ModelFamily | ToolParser | ReasoningParser | Kernels | Drafter | Client,
) -> set[str]:
    return {canonical(name) for name in (record.name, *getattr(record, "aliases", ()))}


def adopt(cli: typer.Typer, hooks: pluggy.HookRelay) -> None:
    """Add the commands of a plugin's `mlx_register_commands` to `cli`; on any error, none. They are
    built once on a separate app, so that a signature that typer cannot read fails here, not at
    `--help`. Raises `PluginError` for a name in use, and any error of the plugin."""
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
    """Names of commands and groups, without building them, which takes time. As in
    `typer.main.get_group_from_info` (typer 0.29)."""
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
