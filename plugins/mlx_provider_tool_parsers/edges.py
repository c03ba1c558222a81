"""Removes the white space at the ends of a text that arrives in pieces."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_provider.records import Emit


@dataclass
class Edges:
    emit: Emit
    begun: bool = False
    held: str = ""

    def piece(self, text: str) -> None:
        if not self.begun:
            text = text.lstrip()
            self.begun = bool(text)
        text = self.held + text
        shown = text.rstrip()
        self.held = text[len(shown) :]
        if shown:
            self.emit(shown)
