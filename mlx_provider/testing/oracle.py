"""A drafter that knows the answers, and is wrong for a given share."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..engine.speculation.asks import Ask, Asks
from ..engine.speculation.odds import RowOdds
from ..engine.speculation.policy import Policy
from ..records import DeviceTokens, DraftRow, Unread


class Oracle:
    def __init__(
        self, share: float, vocab: int = 256, seed: int = 0, *, ahead: bool = False
    ) -> None:
        """Wrong guesses are below `vocab`. `ahead`: it drafts before the last pass is read."""
        self.share = share
        self.drafts_ahead = ahead
        self._vocab = vocab
        self._known: list[list[int]] = []
        self._random = np.random.default_rng(seed)

    def learn(self, tokens: Sequence[int]) -> None:
        self._known.append(list(tokens))

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        return [self._behind(row, row.unread) for row in rows]

    def _behind(self, row: DraftRow, unread: Unread | None) -> Sequence[int]:
        more = 0 if unread is None else unread.tokens.size
        guesses = [self._guess(token) for token in self._next(row, more + row.wanted)]
        if unread is None or not guesses:
            return guesses
        padded = mx.array(guesses + guesses[-1:] * (more + row.wanted - len(guesses)))
        return DeviceTokens(mx.take(padded, unread.held + 1 + mx.arange(row.wanted)))

    def _next(self, row: DraftRow, count: int) -> list[int]:
        size = len(row.tokens)
        found = (text for text in self._known if text[:size] == row.tokens)
        return next(found, [])[size : size + count]

    def _guess(self, token: int) -> int:
        return token if self._random.random() < self.share else (token + 1) % self._vocab


class Eager(Policy):
    """Always wants drafts: at every step, another number from another drafter."""

    turns = 0

    def __init__(self) -> None:
        super().__init__(beside_prompts=True)

    def wanted(
        self, rows: Sequence[Sequence[RowOdds | None]], others: int, seconds: object
    ) -> list[Asks]:
        """0 to `most` for each row, all of them in turn, of one drafter after the other."""
        self.turns += 1
        return [
            self._ask(row, self.turns + i, (self.turns + 3 * i) % (self.most + 1))
            for i, row in enumerate(rows)
        ]

    def _ask(self, row: Sequence[RowOdds | None], turn: int, drafts: int) -> Asks:
        able = [source for source, odds in enumerate(row) if odds is not None]
        return (Ask(able[turn % len(able)], drafts),) if drafts else ()
