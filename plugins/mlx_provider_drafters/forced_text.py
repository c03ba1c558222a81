"""A drafter without guesses: with any drafter, the engine drafts text that a grammar forces."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_provider.records import DraftRow


class ForcedText:
    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        return [() for _ in rows]
