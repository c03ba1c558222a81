"""The files of the disk tier, and the thread that reads and writes them.

A file is a segment or a snapshot, as safetensors with a checksum. Its metadata holds everything but
arrays, so an index needs only headers. The format is read and written here, as the library maps
files, which other processes may cut short, and makes further copies. bfloat16, which numpy lacks,
is handled as its 16 bits. Reads and writes release the interpreter lock. Only the engine thread
makes MLX arrays; this one has numpy views and copies.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import queue
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from ...config import installed_version
from ...safe_open import open_own
from .segments import ArrayPack
from .tree import Ids

log = logging.getLogger(__name__)

FORMAT = 4
SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
MAX_HEADER = 2**24
PIECE = 2**24
SCAN_SECONDS = 2.0
"""Between looks for files of other engines."""
BFLOAT16 = "BF16"
DTYPES = {
    "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "U32": "<u4",
    "I32": "<i4", "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
    "C64": "<c8", BFLOAT16: "<u2",
}  # fmt: skip
_NAMES = {kind: name for name, kind in DTYPES.items() if name != BFLOAT16}
Shapes = list[tuple[str, tuple[int, ...]]]
"""Dtype and shape of each array, in file order."""


class BadFile(Exception):
    """A foreign, damaged or outdated file. The message gives the reason."""


@dataclass(frozen=True)
class Tensor:
    dtype: str
    """A key of `DTYPES`."""
    data: NDArray[Any]

    def pieces(self) -> Iterator[memoryview]:
        flat = self.data.reshape(-1).view(np.uint8).data
        for at in range(0, len(flat), PIECE):
            yield flat[at : at + PIECE]


@dataclass(frozen=True)
class Header:
    key: str
    """Hex digest of the `CacheKey`."""
    parent: str
    """Hex digest of key and tokens `[0, start)`."""
    start: int
    tokens: Ids
    """Tokens of the segment. Empty: a snapshot at `start`."""
    complete: bool
    layers: Sequence[tuple[int, Any]]
    """By leaf index: the number of arrays in a segment, or `Snapshot.layers`."""
    nbytes: int = 0

    @property
    def name(self) -> str:
        """Equal content has an equal name."""
        ids = hashlib.blake2b(self.tokens.tobytes(), digest_size=8).hexdigest()
        kind = "kv" if len(self.tokens) else "state"
        return f"{self.parent}-{ids}-{int(self.complete)}.{kind}{SUFFIX}"


def versions() -> str:
    """Versions that determine the meaning of cached arrays, besides the model."""
    packages = (f"{name} {installed_version(name) or 'none'}" for name in ("mlx-lm", "mlx-vlm"))
    return ", ".join([f"format {FORMAT}", *packages])


def write(folder: Path, header: Header, tensors: Sequence[Tensor], versions: str) -> Path:
    """Write a file atomically: after a crash it is complete or missing. Mode 0600. Raises
    `OSError`."""
    metadata = _metadata(header, versions)
    digest = _digest(metadata)
    for tensor in tensors:
        for piece in tensor.pieces():
            digest.update(piece)
    metadata["checksum"] = digest.hexdigest()
    path = folder / header.name
    temporary = folder / f".{header.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as file:  # noqa: PTH123
            file.write(_table(metadata, tensors))
            for tensor in tensors:
                for piece in tensor.pieces():
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
    """Raises `BadFile` and `OSError`."""
    with os.fdopen(open_own(path), "rb") as file:
        return _begin(file, path.name, versions)[0]


def read(path: Path, versions: str) -> tuple[Header, list[Tensor]]:
    """Raises `BadFile` and `OSError`."""
    with os.fdopen(open_own(path), "rb") as file:
        header, shapes, metadata = _begin(file, path.name, versions)
        tensors = [Tensor(dtype, np.empty(shape, DTYPES[dtype])) for dtype, shape in shapes]
        digest = _digest({k: v for k, v in metadata.items() if k != "checksum"})
        for tensor in tensors:
            for piece in tensor.pieces():
                if file.readinto(piece) != len(piece):
                    raise BadFile("it is cut short")
                digest.update(piece)
        if metadata.get("checksum", "") != digest.hexdigest():
            raise BadFile("wrong checksum")
        return header, tensors


def host_tensors(pack: ArrayPack) -> list[Tensor]:
    """Views of a pack's arrays. Engine thread only."""
    arrays = [pack[i] for i in range(len(pack.places))]
    plain = [a.view(mx.uint16) if a.dtype == mx.bfloat16 else a for a in arrays]
    mx.eval(plain)
    views = [np.asarray(each) for each in plain]
    return [
        Tensor(BFLOAT16 if a.dtype == mx.bfloat16 else _NAMES[view.dtype.str], view)
        for a, view in zip(arrays, views, strict=True)
    ]


def device_array(tensor: Tensor) -> Any:
    """A copy. Engine thread only."""
    array = mx.array(tensor.data)
    return array.view(mx.bfloat16) if tensor.dtype == BFLOAT16 else array


def _begin(file: BinaryIO, name: str, versions: str) -> tuple[Header, Shapes, Mapping[str, str]]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER:
        raise BadFile("no safetensors header")
    try:
        table = from_json(file.read(length))
        metadata = table.pop("__metadata__")
        header = _header(metadata, versions, size)
        shapes = _shapes(table, size - file.tell())
    except (ValueError, KeyError, TypeError, AttributeError) as reason:
        raise BadFile("damaged header") from reason
    if header.name != name:
        raise BadFile("its name does not fit its content")
    return header, shapes, metadata


def _table(metadata: Mapping[str, str], tensors: Sequence[Tensor]) -> bytes:
    table: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for i, tensor in enumerate(tensors):
        offsets = [at, at := at + tensor.data.nbytes]
        shape = tensor.data.shape
        table[f"{i:05}"] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _shapes(table: Mapping[str, Any], left: int) -> Shapes:
    """Dtypes and shapes of contiguous arrays that fill the last `left` bytes of a file."""
    found, at = [], 0
    for name in sorted(table):
        entry = table[name]
        shape = tuple(int(each) for each in entry["shape"])
        size = int(np.prod(shape, dtype=object)) * np.dtype(DTYPES[entry["dtype"]]).itemsize
        if min(shape, default=0) < 0 or entry["data_offsets"] != [at, at + size]:
            raise BadFile("damaged header")
        at += size
        found.append((entry["dtype"], shape))
    if at != left:
        raise BadFile("it has another size than its header says")
    return found


def _metadata(header: Header, versions: str) -> dict[str, str]:
    return {
        "versions": versions,
        "key": header.key,
        "parent": header.parent,
        "start": str(header.start),
        "tokens": base64.b64encode(header.tokens.astype("<i8").tobytes()).decode(),
        "complete": str(int(header.complete)),
        "layers": json.dumps(header.layers),
    }


def _header(metadata: Mapping[str, str], versions: str, size: int) -> Header:
    if metadata.get("versions") != versions:
        raise BadFile(f"made by {metadata.get('versions')}, this is {versions}")
    return Header(
        metadata["key"],
        metadata["parent"],
        int(metadata["start"]),
        np.frombuffer(base64.b64decode(metadata["tokens"]), "<i8").astype(np.int64),
        metadata["complete"] == "1",
        from_json(metadata["layers"]),
        size,
    )


def _digest(metadata: Mapping[str, str]) -> Any:
    return hashlib.sha256(json.dumps(sorted(metadata.items())).encode())


class Writer:
    """The thread that makes all changes in the folder, and reads it, one job after another."""

    def __init__(self, folder: Path, limit: int, versions: str, known: AbstractSet[str]) -> None:
        """`known`: names of files that need no report."""
        self.news: queue.SimpleQueue[Header | str] = queue.SimpleQueue()
        """Files of other processes, and names of files that are gone."""
        self.done = self.written = 0
        """Bytes that no longer wait, and those of them that are on disk."""
        self._path = folder
        self._identity = _identity(folder)
        self._limit = limit
        self._versions = versions
        self._known = set(known)
        self._seen = 0
        self._failure = ""
        self._order = count()
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], object] | None]]
        self._jobs = queue.PriorityQueue()
        self.do(self.shrink)  # the limit may be lower than that of the last process
        self._thread = threading.Thread(target=self._run, name="prefix-disk", daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], object] | None, *, priority: int = 1) -> None:
        """Jobs of priority 0 are done first. `None` ends the thread."""
        self._jobs.put((priority, next(self._order), job))

    def flush(self) -> None:
        done = threading.Event()
        self.do(done.set)
        while not done.wait(SCAN_SECONDS) and self._thread.is_alive():
            pass

    def close(self) -> None:
        self.do(None, priority=2)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except (OSError, BadFile) as reason:
                if str(reason) != self._failure:
                    log.warning("prefix cache: disk tier: %s", reason)
                self._failure = str(reason)

    def _next(self) -> Callable[[], object] | None:
        try:
            return self._jobs.get(timeout=SCAN_SECONDS)[2]
        except queue.Empty:
            return self._scan

    @property
    def _folder(self) -> Path:
        """Raises `BadFile` if another one, or a link, is in its place."""
        if _identity(self._path) != self._identity:
            raise BadFile(f"{self._path} was replaced: nothing is written any more")
        return self._path

    # -- jobs

    def write(self, header: Header, tensors: Sequence[Tensor]) -> None:
        nbytes, on_disk = sum(tensor.data.nbytes for tensor in tensors), False
        try:
            if not (self._folder / header.name).exists():
                write(self._folder, header, tensors, self._versions)
            self._known.add(header.name)
            on_disk = True
        finally:
            self.done += nbytes
            self.written += nbytes if on_disk else 0
            if not on_disk:
                self.news.put(header.name)
        self.shrink()

    def read(self, header: Header) -> list[Tensor]:
        """Raises `BadFile` and `OSError`."""
        return read(self._path / header.name, self._versions)[1]

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def touch(self, names: Sequence[str]) -> None:
        """The path's first file becomes the newest, so that the tail is removed first."""
        now = time.time_ns()
        for later, name in enumerate(reversed(names)):
            path = self._folder / name
            if path.exists():
                os.utime(path, ns=(now + later, now + later))

    def clear(self) -> None:
        for path, _ in self._files():
            path.unlink(missing_ok=True)

    def _scan(self) -> None:
        changed = self._folder.stat().st_mtime_ns
        if changed == self._seen:
            return
        self._seen = changed
        there = {path.name for path, _ in self._files()}
        for name in sorted(there - self._known):
            try:
                self.news.put(read_header(self._folder / name, self._versions))
            except (BadFile, FileNotFoundError):
                continue
        self._known = there

    def shrink(self) -> None:
        found = [(of.st_mtime_ns, allocated(of), path) for path, of in self._files()]
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit:
                return
            path.unlink(missing_ok=True)
            self.news.put(path.name)
            total -= size

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        every = list_files(self._folder.glob(f"*{SUFFIX}"))
        return ((path, of) for path, of in every if stat.S_ISREG(of.st_mode))


def list_files(paths: Iterator[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    for path in paths:
        try:
            yield path, path.lstat()
        except FileNotFoundError:  # another process removed it
            continue


def allocated(file: os.stat_result) -> int:
    """Bytes: holes take none."""
    return min(file.st_size, 512 * file.st_blocks)


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.lstat()
    return found.st_dev, found.st_ino
