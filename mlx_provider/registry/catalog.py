"""Records of one kind, each with the plugin it came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from ..errors import PluginError
from ..records import ModelFamily, ReasoningParser, ToolParser
from .plugin import Plugin

R = TypeVar("R", ModelFamily, ToolParser, ReasoningParser)


class Catalog(Generic[R]):
    """Records by name. A third party may replace one of ours; two strangers may not clash."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        """For people: `model family`, `tool parser`, `reasoning parser`."""
        self._owned: dict[str, tuple[R, Plugin]] = {}

    def check(self, records: Sequence[R], plugin: Plugin) -> None:
        """Raise `PluginError` where a record's name belongs to somebody else."""
        for record in records:
            if record.name not in self._owned:
                continue
            owner = self._owned[record.name][1]
            if not owner.ours or plugin.ours:
                raise PluginError(
                    f"{self.kind} {record.name!r} is claimed by {owner} and by {plugin}; "
                    f"that of {owner} is used"
                )

    def add(self, records: Sequence[R], plugin: Plugin) -> dict[str, Plugin]:
        """Take checked records in; returns the former owner of each name that was replaced."""
        replaced = {r.name: self._owned[r.name][1] for r in records if r.name in self._owned}
        self._owned.update({record.name: (record, plugin) for record in records})
        return replaced

    def names(self) -> dict[str, R]:
        return {name: record for name, (record, _) in self._owned.items()}

    def preferred(self) -> Iterator[tuple[R, Plugin]]:
        """Third parties' records first, then ours; each in the order their plugin chose."""
        yield from sorted(self._owned.values(), key=lambda owned: owned[1].ours)
