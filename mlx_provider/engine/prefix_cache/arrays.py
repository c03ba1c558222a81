"""Immutable arrays kept in few buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class ArrayPack:
    """Arrays, those of equal shape and dtype stacked in one buffer.

    Metal limits the number of live buffers, not only their bytes (mlx #3849, mlx-lm #1672): a
    stack holds all layers in one. Nothing here shares memory with the arrays it was made of
    beyond 16 KiB of slack, so no larger buffer is kept alive.
    """

    stacks: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]
    """Where array i lies: (stack, row)."""

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> ArrayPack:
        """Pack and evaluate."""
        groups: dict[tuple[Any, ...], list[Any]] = {}
        order: dict[tuple[Any, ...], int] = {}
        places: list[tuple[int, int]] = []
        for array in arrays:
            kind = (*array.shape, str(array.dtype))
            group = groups.setdefault(kind, [])
            places.append((order.setdefault(kind, len(order)), len(group)))
            group.append(array)
        # a stack of one is a view, hence `contiguous`
        stacks = tuple(mx.contiguous(mx.stack(group)) for group in groups.values())
        mx.eval(stacks)
        return cls(stacks, tuple(places))

    def __getitem__(self, index: int) -> Any:
        """Array `index`, as a lazy view: writing to it in place leaves the pack alone."""
        stack, row = self.places[index]
        return self.stacks[stack][row : row + 1].squeeze(0)  # an index alone copies (MLX 0.32.4)

    def cut(self, start: int, stop: int) -> ArrayPack:
        """The same arrays, tokens `start .. stop` of their token axis (-2), as copies."""
        stacks = tuple(mx.contiguous(stack[..., start:stop, :]) for stack in self.stacks)
        mx.eval(stacks)
        return ArrayPack(stacks, self.places)

    @property
    def buffers(self) -> int:
        """Device buffers that it holds."""
        return len(self.stacks)

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)
