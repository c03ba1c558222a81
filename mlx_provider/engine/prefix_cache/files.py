"""The folder of the disk tier: its files, and the thread that reads and writes them.

A file is a segment or a snapshot, as safetensors with a checksum. It never changes, is named by its
content, and appears by rename, so processes may share the folder. A file that another one removed
is a miss. Its metadata holds everything but arrays, so an index needs only headers. Files are read
whole, since another process may cut short what is mapped. bfloat16, which numpy lacks, is stored as
its 16 bits. Only the engine thread makes MLX arrays. The disk thread gets numpy arrays."""

import hashlib
import json
import logging
import os
import queue
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count as numbers
from pathlib import Path
from tempfile import gettempprefix
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ...config import installed_version
from ...errors import BadRequest
from ...isolation import Fault, attempt
from ...safe_open import make_folder, open_own, replace_own
from .tree import Ids

log = logging.getLogger(__name__)

FOLDER = "prefixes"  # in the folder that `disk_limit` and `bytes_on_disk` take; others take this
FREE_SHARE = 0.1  # the default limit, of the free disk space,
MAX_BYTES = 20 * 10**9  # but at most so many bytes
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
STALE = 3600.0
"""Seconds after which a temporary file counts as abandoned."""
FORMAT = 7  # files of another format are removed
SUFFIX = ".safetensors"
MAX_HEADER = 2**24  # bytes
BFLOAT16 = "bf16"
NO_CHECKSUM = "-" * 64
"""In place of the checksum while it is computed."""
Arrays = Mapping[str, NDArray[Any]]
"""By position, in five digits. A bfloat16 array is of uint16, and has the suffix `BFLOAT16`."""


class BadFile(Exception):
    """A foreign, damaged or outdated file. The message gives the reason."""


@dataclass(frozen=True)
class Header:
    """What a file is, without its arrays."""

    parent: str  # hex digest of key and tokens `[0, start)`
    start: int  # position of the first token; of a snapshot, its token count
    tokens: Ids  # of the segment; none of a snapshot
    complete: bool  # whether a segment has all layers, so that a row can resume at any token
    layers: Sequence[tuple[int, Any]]
    """(layer index, number of arrays) of a segment, or the items of `Snapshot.layers`."""
    nbytes: int = 0  # size of the file
    state: bool = False  # whether it is a snapshot

    @property
    def name(self) -> str:
        """The file's name. Equal content has an equal name."""
        if self.state:
            return snapshot_name(self.parent)
        ids = hashlib.blake2b(self.tokens.tobytes(), digest_size=8).hexdigest()
        return f"{self.parent}-{ids}.kv{SUFFIX}"


def snapshot_name(parent: str) -> str:
    return f"{parent}.state{SUFFIX}"


def current_versions() -> str:
    """Versions that determine the meaning of cached arrays, besides the model."""
    packages = (f"{name} {installed_version(name) or 'none'}" for name in ("mlx-lm", "mlx-vlm"))
    return ", ".join([f"format {FORMAT}", *packages])


def write(folder: Path, header: Header, arrays: Arrays, versions: str) -> Path:
    """Write a file of this folder. Returns its path. Raises `OSError`."""
    about = [header.parent, header.start, header.tokens.tolist(), header.complete]
    metadata = {"versions": versions, "header": json.dumps([*about, header.layers, header.state])}
    data = save({**arrays}, metadata | {"checksum": NO_CHECKSUM})
    offset = 8 + int.from_bytes(data[:8], "little")  # of the arrays
    head = data[:offset].replace(NO_CHECKSUM.encode(), hashlib.sha256(data).hexdigest().encode(), 1)
    replace_own(folder / header.name, b"".join((head, memoryview(data)[offset:])))
    return folder / header.name


def read_header(path: Path, versions: str) -> Header:
    """Reads and checks only the header. Raises `BadFile` and `OSError`."""
    with os.fdopen(open_own(path), "rb") as file:
        return _read_head(file, path.name, versions)[0]


def read(path: Path, versions: str) -> tuple[Header, Arrays]:
    """Checks the whole file. Raises `BadFile` and `OSError`."""
    with os.fdopen(open_own(path), "rb") as file:
        header, head, checksum = _read_head(file, path.name, versions)
        arrays = file.read()
    data = head.replace(checksum.encode(), NO_CHECKSUM.encode(), 1) + arrays
    if hashlib.sha256(data).hexdigest() != checksum:
        raise BadFile("wrong checksum")
    try:
        return header, load(data)
    except SafetensorError as reason:
        raise BadFile(str(reason)) from reason


def host_arrays(arrays: Sequence[Any]) -> Arrays:
    """Numpy views of device arrays. Engine thread only."""
    are_bfloat = [a.dtype == mx.bfloat16 for a in arrays]
    plain = [a.view(mx.uint16) if is_b else a for a, is_b in zip(arrays, are_bfloat, strict=True)]
    mx.eval(plain)
    names = (f"{i:05}{BFLOAT16 if is_b else ''}" for i, is_b in enumerate(are_bfloat))
    return {name: np.asarray(a, order="C") for name, a in zip(names, plain, strict=True)}


def device_arrays(arrays: Arrays) -> list[Any]:
    """Device copies of `host_arrays`, in their order. Engine thread only."""
    made = ((name, mx.array(arrays[name])) for name in sorted(arrays))
    return [a.view(mx.bfloat16) if name.endswith(BFLOAT16) else a for name, a in made]


def _read_head(file: BinaryIO, name: str, versions: str) -> tuple[Header, bytes, str]:
    """The header, the bytes before the arrays, and the checksum. Raises `BadFile`."""
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER:
        raise BadFile("no safetensors header")
    head = first + file.read(length)
    try:
        metadata = from_json(head[8:])["__metadata__"]
        if metadata["versions"] != versions:
            raise BadFile(f"made by {metadata['versions']}, this is {versions}")
        parent, start, tokens, complete, layers, state = from_json(metadata["header"])
        ids = np.array(tokens, np.int64)
        size = os.fstat(file.fileno()).st_size
        header = Header(parent, int(start), ids, bool(complete), layers, size, bool(state))
        checksum = str(metadata["checksum"])
    except (ValueError, KeyError, TypeError, OverflowError) as reason:
        raise BadFile("damaged header") from reason
    if header.name != name or header.start < 0 or header.state == bool(len(ids)):
        raise BadFile("its name does not fit its content")
    return header, head, checksum


class DiskThread:
    """Makes all changes in the folder, and reads it, one job after another (`do`). Only jobs call
    the methods from `write` on."""

    def __init__(self, folder: Path, versions: str) -> None:
        self.done = 0  # bytes that were written or given up
        self._path = folder
        self._identity = _identity(folder)
        self._versions = versions
        self._failure = ""
        self._order = numbers()
        self._jobs = queue.PriorityQueue[tuple[int, int, Callable[[], object] | None]]()
        self._thread = threading.Thread(target=self._run, name="prefix-disk", daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], object] | None, *, priority: int = 1) -> None:
        """Queue a job. Those of the lowest priority are done first. `None` ends the thread."""
        self._jobs.put((priority, next(self._order), job))

    def close(self) -> None:
        """Wait until all queued jobs are done, and end the thread."""
        self.do(None, priority=2)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            done = attempt(job)
            if isinstance(done, Fault) and done.summary != self._failure:
                log.warning("prefix cache: disk tier: %s", done.summary)
                self._failure = done.summary

    @property
    def _folder(self) -> Path:
        """The folder to change. Raises `BadFile` if another one, or a link, is in its place."""
        if _identity(self._path) != self._identity:
            raise BadFile(f"{self._path} was replaced: nothing is written any more")
        return self._path

    def write(self, header: Header, arrays: Arrays, forget: Callable[[], object]) -> None:
        """Write a file unless it is there. If that fails, calls `forget` and raises."""
        try:
            if not (self._folder / header.name).exists():  # else another process wrote it
                write(self._folder, header, arrays, self._versions)
        except Exception:  # whatever the reason, the file is not there
            forget()
            raise
        finally:
            self.done += sum(array.nbytes for array in arrays.values())

    def read(self, header: Header) -> Arrays:
        """Raises `BadFile` and `OSError`."""
        return read(self._path / header.name, self._versions)[1]

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all regular files of the disk tier."""
        for path, status in list_files(self._folder):
            if path.suffix == SUFFIX and stat.S_ISREG(status.st_mode):
                path.unlink(missing_ok=True)

    def touch(self, names: Sequence[str]) -> None:
        """Record a use of these files for the next process: the last one becomes the newest."""
        now = time.time_ns()
        for later, name in enumerate(names):
            with suppress(FileNotFoundError):
                os.utime(self._folder / name, ns=(now + later, now + later))


def list_files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.glob("*"):
        try:
            yield path, path.lstat()
        except FileNotFoundError:  # another process removed it
            continue


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.lstat()
    return found.st_dev, found.st_ino


def disk_limit(folder: Path, chosen: int | None) -> int:
    """Most bytes of the disk tier in `folder`: as chosen, or else by the free space."""
    if chosen is not None:
        return chosen
    place = next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))
    free = shutil.disk_usage(place).free + bytes_on_disk(folder)
    return min(MAX_BYTES, int(FREE_SHARE * free))


def bytes_on_disk(folder: Path) -> int:
    """Bytes that the disk tier in `folder` takes now, without the holes of sparse files."""
    files = list_files(folder / FOLDER)
    return sum(min(status.st_size, 512 * status.st_blocks) for _, status in files)


def read_headers(folder: Path, versions: str) -> Iterator[Header]:
    """The headers of all files, the oldest first. Removes damaged, outdated and abandoned files."""
    refused = Counter[str]()
    for path, status in sorted(list_files(folder), key=lambda entry: entry[1].st_mtime_ns):
        try:
            if path.name.startswith(gettempprefix()) and time.time() - status.st_mtime > STALE:
                path.unlink(missing_ok=True)
            if path.suffix == SUFFIX:
                if stat.S_IFMT(status.st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                    raise BadFile("no regular file")
                yield read_header(path, versions)
        except BadFile as reason:
            refused[f"removed: {reason}"] += 1
            path.unlink(missing_ok=True)
        except OSError as reason:
            refused[str(reason.strerror)] += 1
    for text, count in refused.items():
        log.warning("prefix cache: %d files in %s ignored: %s", count, folder, text)


def secure_folder(folder: Path) -> None:
    """Create the folder for this user only. Raises `BadRequest` if it cannot be trusted or used."""
    try:
        make_folder(folder)
        found = folder.lstat()
        if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid():
            raise BadRequest(f"{folder} is a link or belongs to another user", param="disk_cache")
        folder.chmod(0o700)
        above = folder.parent.stat()
    except OSError as error:
        raise BadRequest(f"{folder} cannot be used: {error.strerror}", param="disk_cache") from None
    if found.st_mode & OTHERS_WRITE:
        log.warning("prefix cache: other users could write in %s until this start", folder)
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        log.warning("prefix cache: other users can replace %s: run `chmod go-w` above it", folder)
