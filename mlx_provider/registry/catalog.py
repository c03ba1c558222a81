"""Records of one kind, each with the plugin that yields it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from ..errors import BadRequest, PluginError
from ..records import Client, Drafter, Kernels, ModelFamily, ReasoningParser, ToolParser
from .discovery import Plugin, canonical, near

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
