"""Drafts out of earlier replies: of each tenant its own."""

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_provider.records import DraftRow

from .automaton import EMPTY, Automaton

LEAST_TOKENS = 3
"""Tokens that must have stood before for what followed them to be a draft."""
BEGIN = 16
"""Last tokens of a prompt that are remembered with its reply, which may then be foreseen from its
first token on."""
SURE = 0.4
"""Share of the cases in which the words before were followed by all of a draft, at the least."""
MOST_TOKENS = 50_000
"""Tokens that are remembered of all tenants together."""
TOKEN_BYTES = 800
"""Memory of each: 430 bytes in texts of many kinds, and room for as many states as there can be."""


@dataclass
class Place:
    """How far a row is remembered."""

    memory: Automaton
    read: int
    """Of the row's tokens, those up to here."""
    text: int = EMPTY


class Recall:
    """A `Drafting` that computes nothing on the device."""

    def __init__(self, most: int = MOST_TOKENS) -> None:
        """`most`: see `MOST_TOKENS`."""
        self.most = most
        self._memories: dict[str, Automaton] = {}
        """By tenant, the one that was used last at the end."""

    @property
    def tokens(self) -> int:
        """Remembered of all tenants."""
        return sum(memory.tokens for memory in self._memories.values())

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        """See `Drafting`. Whatever a row says is remembered, too."""
        found = [_drafts(self._place(row), row.wanted) for row in rows]
        self._forget()
        return found

    def _place(self, row: DraftRow) -> Place:
        memory = self._memories[row.salt] = self._memories.pop(row.salt, None) or Automaton()
        if row.state is None or row.state.memory is not memory:
            row.state = Place(memory, max(0, len(row.tokens) - BEGIN))
        own: Place = row.state
        for token in row.tokens[own.read :]:
            own.text = memory.append(own.text, token)
        own.read = len(row.tokens)
        return own

    def _forget(self) -> None:
        """All of the tenant who was here longest ago, until there is room."""
        while self.tokens > self.most:
            del self._memories[next(iter(self._memories))]


def _drafts(own: Place, wanted: int) -> list[int]:
    """What mostly followed, as long as it is likely enough that all of it does."""
    found: list[int] = []
    state, sure = own.memory.before(own.text, LEAST_TOKENS), 1.0
    while state is not None and len(found) < wanted:
        token, behind, share = own.memory.likeliest(state)
        sure *= share
        if sure < SURE:
            break
        found.append(token)
        state = own.memory.before(behind, LEAST_TOKENS)
    return found
