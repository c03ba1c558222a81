"""The encoding of packed arrays in a file of the disk tier, bit for bit.

Other threads see array memory only as numpy views; the engine thread creates and evaluates arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .arrays import ArrayPack
from .files import Contents, HostArray


@dataclass(frozen=True)
class Encoded:
    structure: Mapping[str, Any]
    arrays: tuple[HostArray, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def encode(pack: ArrayPack) -> Encoded:
    arrays = [_plain(stack) for stack in pack.stacks]
    mx.eval(arrays)
    structure = {"places": pack.places, "dtypes": [_name(stack) for stack in pack.stacks]}
    return Encoded(structure, tuple(_view(array) for array in arrays))


@dataclass(frozen=True)
class Staged:
    structure: Mapping[str, Any]
    arrays: tuple[Any, ...]

    @classmethod
    def of(cls, contents: Contents) -> Staged:
        """Raises `ValueError` and `TypeError` for an unknown structure."""
        arrays = [mx.zeros(shape, _dtype(kind)) for shape, kind in contents.shapes]
        mx.eval(arrays)
        return cls(contents.header.structure, tuple(arrays))

    def views(self) -> Sequence[HostArray]:
        return [_view(array) for array in self.arrays]

    def pack(self) -> ArrayPack:
        dtypes = self.structure["dtypes"]
        stacks = (_as(a, _dtype(name)) for a, name in zip(self.arrays, dtypes, strict=True))
        return ArrayPack(tuple(stacks), tuple((g, r) for g, r in self.structure["places"]))

    def __getitem__(self, index: int) -> Any:
        stack, row = self.structure["places"][index]
        array = self.arrays[stack][row : row + 1].squeeze(0)
        return _as(array, _dtype(self.structure["dtypes"][stack]))


def _plain(array: Any) -> Any:
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


def _as(array: Any, dtype: Any) -> Any:
    return array if array.dtype == dtype else array.view(dtype)


def _view(array: Any) -> HostArray:
    return np.asarray(array)


def _name(array: Any) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        return mx.bfloat16
    kind = np.dtype(name.removesuffix("_")).name
    return mx.bool_ if kind == "bool" else getattr(mx, kind)
