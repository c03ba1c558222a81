"""No guesses: the engine drafts what a grammar forces, beside any drafter."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_provider.records import DraftRow


class ForcedText:
    """A `Drafting` that leaves its rows to their grammars."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        return [() for _ in rows]
