"""Immutable arrays in few buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class ArrayPack:
    """Metal limits the number of live buffers, not only their bytes (mlx #3849, mlx-lm #1672), so
    arrays of equal shape and dtype are stacked in one. A pack keeps no larger source buffer
    alive."""

    stacks: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, arrays: Sequence[Any]) -> ArrayPack:
        groups: dict[tuple[Any, ...], list[Any]] = {}
        order: dict[tuple[Any, ...], int] = {}
        places: list[tuple[int, int]] = []
        for array in arrays:
            kind = (*array.shape, str(array.dtype))
            group = groups.setdefault(kind, [])
            places.append((order.setdefault(kind, len(order)), len(group)))
            group.append(array)
        # a stack of one array is a view, hence `contiguous`
        stacks = tuple(mx.contiguous(mx.stack(group)) for group in groups.values())
        mx.eval(stacks)
        return cls(stacks, tuple(places))

    @classmethod
    def loose(cls, arrays: Sequence[Any]) -> ArrayPack:
        return cls(
            tuple(array[None] for array in arrays), tuple((i, 0) for i in range(len(arrays)))
        )

    def __getitem__(self, index: int) -> Any:
        """A lazy view. Writing to it in place does not change the pack."""
        stack, row = self.places[index]
        return self.stacks[stack][row : row + 1].squeeze(0)  # an index alone copies (MLX 0.32.4)

    def cut(self, start: int, stop: int) -> ArrayPack:
        """Copies of tokens `start .. stop` of the token axis (-2)."""
        stacks = tuple(mx.contiguous(stack[..., start:stop, :]) for stack in self.stacks)
        mx.eval(stacks)
        return ArrayPack(stacks, self.places)

    @property
    def buffers(self) -> int:
        return len(self.stacks)

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)
