"""One file of the disk tier: a segment or a snapshot, as safetensors with a checksum.

The header's metadata holds everything but arrays, so an index needs only headers. bfloat16, which
numpy lacks, is stored as its 16 bits. Reads and writes release the interpreter lock.

The encoding of packed arrays in a file of the disk tier, bit for bit.

Other threads see array memory only as numpy views; the engine thread creates and evaluates arrays.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from ...installed import installed_version
from ...safe_open import open_own
from .layer_kinds import ArrayPack
from .tree import Ids

FORMAT = 3
SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
MAX_HEADER = 2**24
PIECE = 2**24
DTYPES = {
    "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "U32": "<u4",
    "I32": "<i4", "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
    "C64": "<c8",
}  # fmt: skip
_NAMES = {kind: name for name, kind in DTYPES.items()}

HostArray = NDArray[Any]


class BadFile(Exception):
    """A foreign, damaged or outdated file. The message gives the reason."""


@dataclass(frozen=True)
class Header:
    key: str
    """Hex digest of the `CacheKey`."""
    parent: str
    """Hex digest of key and tokens `0 .. start`."""
    start: int
    tokens: Ids
    """Tokens of the segment. Empty: a snapshot at `start`."""
    complete: bool
    structure: Mapping[str, Any]
    nbytes: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def name(self) -> str:
        """Equal content has an equal name."""
        ids = hashlib.blake2b(self.tokens.tobytes(), digest_size=8).hexdigest()
        kind = "kv" if len(self.tokens) else "state"
        return f"{self.parent}-{ids}-{int(self.complete)}.{kind}{SUFFIX}"


@dataclass(frozen=True)
class Contents:
    file: BinaryIO
    header: Header
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and dtype (numpy's name) of each array, in file order."""
    metadata: Mapping[str, str]

    def read_into(self, arrays: Sequence[HostArray]) -> None:
        """Fill contiguous arrays of these shapes. Raises `BadFile` and `OSError`."""
        digest = _digest({k: v for k, v in self.metadata.items() if k != "checksum"})
        for array in arrays:
            for piece in _pieces(array):
                if self.file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                    raise BadFile("it is cut short")
                digest.update(piece)
        if self.metadata.get("checksum", "") != digest.hexdigest():
            raise BadFile("wrong checksum")


def versions() -> str:
    """Versions that determine the meaning of cached arrays, besides the model."""
    packages = (f"{name} {installed_version(name) or 'none'}" for name in ("mlx-lm", "mlx-vlm"))
    return ", ".join([f"format {FORMAT}", *packages])


def write(folder: Path, header: Header, arrays: Sequence[HostArray], versions: str) -> Path:
    """Write a file atomically: after a crash it is complete or missing. Mode 0600. Raises
    `OSError`, and `BadFile` for arrays that the format cannot hold."""
    metadata = _metadata(header, versions)
    digest = _digest(metadata)
    for array in arrays:
        for piece in _pieces(array):
            digest.update(piece)
    metadata["checksum"] = digest.hexdigest()
    path = folder / header.name
    temporary = folder / f".{header.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as file:  # noqa: PTH123
            file.write(_table(metadata, arrays))
            for array in arrays:
                for piece in _pieces(array):
                    file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    entries = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(entries)
    finally:
        os.close(entries)
    return path


def read_header(path: Path, versions: str) -> Header:
    with os.fdopen(open_own(path), "rb") as file:
        return _header(_metadata_of(_begin(file)), versions, os.fstat(file.fileno()).st_size)


def open_file(path: Path, versions: str) -> Contents:
    """Arrays are read later. Raises `BadFile` and `OSError`."""
    file = os.fdopen(open_own(path), "rb")
    try:
        table = _begin(file)
        metadata = _metadata_of(table)
        size = os.fstat(file.fileno()).st_size
        header = _header(metadata, versions, size)
        return Contents(file, header, _shapes(table, size - file.tell()), metadata)
    except BaseException:
        file.close()
        raise


def read(path: Path, versions: str) -> tuple[Header, list[HostArray]]:
    contents = open_file(path, versions)
    with contents.file:
        arrays = [np.empty(shape, dtype) for shape, dtype in contents.shapes]
        contents.read_into(arrays)
    return contents.header, arrays


def _pieces(array: HostArray) -> Iterator[memoryview]:
    if not array.flags.c_contiguous:
        raise BadFile("an array that is not contiguous")
    flat = array.reshape(-1).view(np.uint8).data
    for at in range(0, len(flat), PIECE):
        yield flat[at : at + PIECE]


def _table(metadata: Mapping[str, str], arrays: Sequence[HostArray]) -> bytes:
    table: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for i, array in enumerate(arrays):
        name = _NAMES.get(array.dtype.str)
        if name is None:
            raise BadFile(f"safetensors has no {array.dtype}")
        offsets = [at, at := at + array.nbytes]
        table[f"{i:04}"] = {"dtype": name, "shape": array.shape, "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _begin(file: BinaryIO) -> dict[str, Any]:
    size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER:
        raise BadFile("no safetensors header")
    try:
        table = from_json(file.read(size))
    except ValueError as reason:
        raise BadFile("no header of ours") from reason
    if not isinstance(table, dict):
        raise BadFile("no header of ours")
    return table


def _shapes(table: Mapping[str, Any], left: int) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes and dtypes of contiguous arrays that fill the last `left` bytes of a file."""
    found, at = [], 0
    try:
        for name in sorted(table.keys() - {"__metadata__"}):
            shape = tuple(int(each) for each in table[name]["shape"])
            kind, offsets = DTYPES[table[name]["dtype"]], table[name]["data_offsets"]
            size = int(np.prod(shape, dtype=object)) * np.dtype(kind).itemsize
            if min(shape, default=0) < 0 or offsets != [at, at + size]:
                raise BadFile("damaged header")
            at += size
            found.append((shape, kind))
    except (ValueError, KeyError, TypeError) as reason:
        raise BadFile("damaged header") from reason
    if at != left:
        raise BadFile("it has another size than its header says")
    return tuple(found)


def _metadata(header: Header, versions: str) -> dict[str, str]:
    return {
        "versions": versions,
        "key": header.key,
        "parent": header.parent,
        "start": str(header.start),
        "tokens": base64.b64encode(header.tokens.astype("<i8").tobytes()).decode(),
        "complete": str(int(header.complete)),
        "structure": json.dumps(header.structure),
    }


def _metadata_of(table: Mapping[str, Any]) -> dict[str, str]:
    metadata = table.get("__metadata__")
    if not isinstance(metadata, dict):
        raise BadFile("no header of ours")
    return metadata


def _header(metadata: Mapping[str, str], versions: str, size: int) -> Header:
    if metadata.get("versions") != versions:
        raise BadFile(f"made by {metadata.get('versions')}, this is {versions}")
    try:
        return Header(
            metadata["key"],
            metadata["parent"],
            int(metadata["start"]),
            np.frombuffer(base64.b64decode(metadata["tokens"]), "<i8").astype(np.int64),
            metadata["complete"] == "1",
            from_json(metadata["structure"]),
            size,
        )
    except (ValueError, KeyError, TypeError) as reason:
        raise BadFile("damaged header") from reason


def _digest(metadata: Mapping[str, str]) -> Any:
    return hashlib.sha256(json.dumps(sorted(metadata.items())).encode())


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
