"""A constraint that waits until the model has finished thinking."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .compiler import Constraint


@dataclass(frozen=True)
class Thoughts:
    """`opened`: the prompt ends inside a thought. Otherwise the model may open one with `start`, if
    that is one token."""

    start: str
    ends: tuple[str, ...]
    opened: bool
    barred: tuple[str, ...] = ()
    """Single tokens that are forbidden inside thoughts, because they would end one, such as the
    opener of a call."""


@dataclass(eq=False)
class AfterThoughts:
    """Allows any thought up to its end marker, but not the end of the reply."""

    _inner: Constraint
    _ends: tuple[str, ...]
    _fast: Any
    _free: NDArray[np.uint32]
    _start: int | None
    """`None`: no thought can be opened any more."""
    _thinking: bool
    _tail: list[int] = field(default_factory=list)

    @classmethod
    def over(
        cls, inner: Constraint, thoughts: Thoughts, fast: Any, eos: Iterable[int], vocab_size: int
    ) -> AfterThoughts:
        allowed = np.ones((vocab_size + 31) // 32 * 32, dtype=bool)
        allowed[vocab_size:] = False
        barred = [fast.token_to_id(text) for text in thoughts.barred]
        barred += eos
        allowed[[token for token in barred if token is not None and token < vocab_size]] = False
        start = fast.token_to_id(thoughts.start) if thoughts.start else None
        free = np.packbits(allowed, bitorder="little").view(np.uint32)
        return cls(inner, thoughts.ends, fast, free, start, thoughts.opened)

    def mask(self) -> NDArray[np.uint32]:
        if self._thinking:
            return self._free
        mask = self._inner.mask()
        if self._start is not None:
            mask[self._start // 32] |= np.uint32(1 << self._start % 32)
        return mask

    def forced(self) -> list[int]:
        """Empty where a thought is open or may be opened."""
        return [] if self._thinking or self._start is not None else self._inner.forced()

    def advance(self, token: int) -> None:
        """Raises the errors of `Constraint.advance`."""
        if self._thinking:
            self._think(token)
            return
        starts, self._start = token == self._start, None
        if starts:
            self._thinking = True
        else:
            self._inner.advance(token)

    def _think(self, token: int) -> None:
        # The marker may extend over several tokens, and the last of them may extend beyond it.
        longest = max(map(len, self._ends), default=0)
        self._tail = [*self._tail, token][-longest - 1 :]
        text = self._fast.decode(self._tail, skip_special_tokens=False)
        closed = [text.rpartition(end)[2] for end in self._ends if end in text]
        if not closed:
            return
        rest = min(closed, key=len)
        self._thinking, self._start, self._tail = False, None, []
        if rest.strip():
            ids = self._fast.encode(rest.strip(), add_special_tokens=False).ids
            self._inner.take_text(rest, ids)

    @property
    def finished(self) -> bool:
        return not self._thinking and self._inner.finished

    @property
    def complete(self) -> bool:
        return not self._thinking and self._inner.complete

    def fork(self) -> AfterThoughts:
        return replace(self, _inner=self._inner.fork(), _tail=list(self._tail))
