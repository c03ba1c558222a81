"""The disk tier: stores prefixes for later processes, and more than fits into memory.

Two threads write segments during prefill and read them back; the engine thread decides, and creates
every array. A file never changes, is named by its content, and appears by rename, so processes may
share a folder. A file removed by another process is a miss.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...errors import BadRequest
from ...safe_open import make_folder, replace_own
from . import files
from .disk_index import FOLDER, Chain, Index, Step
from .files import BadFile, Encoded, Header, encode
from .insertion import INSIDE, RECENT
from .restore import Restore
from .segments import RowParts
from .snapshots import Snapshot
from .tree import CacheKey, Ids
from .writer import Call, Reader, Writer

log = logging.getLogger(__name__)

EDGE = 1024
"""Most tokens of a file: limits the memory to write or read it."""
MAX_QUEUED = 2**29
"""Most bytes that wait to be written. The rest of a prompt is written with a later pass."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
STALE = 3600.0
"""Seconds after which a temporary file counts as abandoned."""
BACKUP_MARK = "CACHEDIR.TAG"
BACKUP_TEXT = b"Signature: 8a477f597d28d172789f06886806bc55\n"
"""Marks the folder as a cache for backup programs (bford.info/cachedir)."""


@dataclass(frozen=True)
class Stored:
    """A prefix of `length` tokens on disk, beyond the part in memory."""

    length: int
    complete: bool
    """Whether a row can resume at any of its tokens."""
    segments: Sequence[Step]
    state: Header | None


class DiskTier:
    """Engine thread only, except for the threads that it starts."""

    def __init__(
        self,
        folder: Path,
        limit: int,
        call: Call,
        *,
        versions: str | None = None,
    ) -> None:
        """`call` runs a function on the engine thread. Raises `BadRequest` for a bad folder."""
        self.folder = folder / FOLDER
        self.limit = limit
        self.versions = files.versions() if versions is None else versions
        _own(self.folder)
        self._index = Index()
        self._build_index()
        self._queued = 0
        self._written = 0
        self._skipped = 0
        self._news: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Header] = queue.SimpleQueue()
        known = self._index.names
        self._writer = Writer(self.folder, limit, self.versions, self._news, self._found, known)
        self._reader = Reader(self.folder, self.versions, call, self._writer.flush)

    # -- writing

    def due(self, start: int, stop: int) -> bool:
        return stop // EDGE > start // EDGE

    def save(
        self,
        key: CacheKey,
        ids: Ids,
        row: RowParts,
        states: Mapping[int, Snapshot],
        *,
        prompted: int | None = None,
    ) -> None:
        """Queue what is not on disk yet of a row with tokens `ids`. `states`: snapshots by token
        count. `prompted`: tokens before the reply. `None`: more of the prompt will follow, so its
        last tokens can wait."""
        self._drain()
        steps = self._index.walk(key, ids)
        covered = sum(took for _, _, took in steps)
        complete = row.complete and all(header.complete for header, _, _ in steps)
        path = [header.name for header, _, _ in steps]
        left = self.limit - sum(header.nbytes for header, _, _ in steps)
        stop = len(ids) if prompted is not None else len(ids) // EDGE * EDGE
        chain, own = Chain(key, ids), key.digest().hex()
        for start, end in pairwise(_cuts(covered, stop, prompted)):
            size = (end - start) * row.token_bytes(complete=complete)
            if _file_bytes(end - start, size) > left or not self._takes(size):
                break
            segment = row.cut(start, end, complete=complete)
            encoded = encode(segment.pack)
            shape = {"layers": segment.layers, **encoded.structure}
            size = _file_bytes(end - start, encoded.nbytes)
            head = Header(own, chain.at(start), start, ids[start:end], complete, shape, size)
            self._write(head, encoded, path)
            path.append(head.name)
            left -= size
        if not complete:
            self._save_states(key, ids, states, path)
        if prompted is not None:
            self._writer.touch(path)

    def _save_states(
        self, key: CacheKey, ids: Ids, states: Mapping[int, Snapshot], path: Sequence[str]
    ) -> None:
        chain, own = Chain(key, ids), key.digest().hex()
        for at, state in sorted(states.items()):
            digest = chain.at(at)
            if digest not in self._index.states and self._takes(state.nbytes):
                encoded = encode(state.pack)
                shape = {"layers": list(state.layers.items()), **encoded.structure}
                size = _file_bytes(0, encoded.nbytes)
                head = Header(own, digest, at, ids[:0], False, shape, size)
                self._write(head, encoded, path)
        every = self._index.states_along(key, ids, len(ids))
        for header in every[RECENT + INSIDE : -1]:  # the first and the last ones stay
            self._forget(header.name)

    def _takes(self, size: int) -> bool:
        fits = not self._queued or self._queued + size <= MAX_QUEUED
        self._skipped += not fits
        return fits

    def _write(self, header: Header, encoded: Encoded, path: Sequence[str]) -> None:
        self._queued += encoded.nbytes
        self._index.add(header)
        self._writer.write(header, encoded.arrays, encoded.nbytes, path)

    def touch(self, key: CacheKey, ids: Ids) -> None:
        self._writer.touch([header.name for header, _, _ in self._index.walk(key, ids)])

    # -- reading

    def find(
        self,
        key: CacheKey,
        ids: Ids,
        shared: int,
        *,
        complete: bool,
        usable: Callable[[int], int],
    ) -> Stored:
        """The longest prefix of `ids` from which a row can resume. Memory has the first `shared`
        tokens. `complete`: with every layer. `usable`: maps a length to the largest length at which
        a row may resume."""
        self._drain()
        steps = self._index.walk(key, ids)
        covered = max(shared, sum(took for _, _, took in steps))
        complete = complete and all(header.complete for header, _, _ in steps)
        state = None
        length = usable(covered) if complete else 0
        if not complete:
            along = self._index.states_along(key, ids, covered)
            state = next((each for each in along if usable(each.start) == each.start), None)
            length = 0 if state is None else state.start
        beyond = [step for step in steps if step[1] < length and step[1] + step[2] > shared]
        return Stored(length, complete, beyond, state)

    def read(self, restore: Restore) -> None:
        self._reader.read(restore)

    def damaged(self, name: str, reason: BadFile | OSError) -> None:
        if isinstance(reason, FileNotFoundError):  # not written yet, or another process removed it
            if not self._queued:
                self._index.remove(name)
            return
        log.warning("prefix cache: %s is ignored and removed: %s", self.folder / name, reason)
        self._forget(name)

    # -- the folder

    def clear(self) -> None:
        self._drain()
        self._index = Index()
        self._writer.clear()

    def report(self) -> dict[str, Any]:
        """Files and bytes known to this process, and writes postponed because the disk was slow."""
        self._drain()
        return {
            "files": len(self._index.names),
            "bytes": self._index.nbytes,
            "limit": self.limit,
            "written_bytes": self._written,
            "skipped": self._skipped,
        }

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _forget(self, name: str) -> None:
        self._index.remove(name)
        self._writer.remove(name)

    def _drain(self) -> None:
        while not self._found.empty():
            self._index.add(self._found.get())
        while not self._news.empty():
            gone, written = self._news.get()
            self._queued -= written
            if gone:
                self._index.remove(gone)
            else:
                self._written += written

    def _build_index(self) -> None:
        refused: dict[str, int] = {}
        ignored: dict[str, int] = {}
        for path in sorted(self.folder.iterdir()):
            try:
                if path.suffix == files.TEMPORARY and time.time() - path.lstat().st_mtime > STALE:
                    path.unlink(missing_ok=True)
                if path.suffix == files.SUFFIX:
                    if stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                        raise BadFile("no regular file")
                    header = files.read_header(path, self.versions)
                    if header.name != path.name:
                        raise BadFile("its name does not fit its content")
                    self._index.add(header)
            except BadFile as reason:
                refused[str(reason)] = refused.get(str(reason), 0) + 1
                path.unlink(missing_ok=True)
            except OSError as reason:
                ignored[str(reason.strerror)] = ignored.get(str(reason.strerror), 0) + 1
        for text, count in ignored.items():
            log.warning("prefix cache: %d files in %s ignored: %s", count, self.folder, text)
        for text, count in refused.items():
            log.warning("prefix cache: %d files on disk ignored and removed: %s", count, text)


def _file_bytes(tokens: int, nbytes: float) -> int:
    return int(nbytes) + 12 * tokens + 2**12


def _cuts(start: int, stop: int, prompted: int | None) -> list[int]:
    edges = {*range(start // EDGE * EDGE + EDGE, stop, EDGE), prompted or 0}
    return sorted({at for at in edges if start < at < stop} | {start, stop}) if start < stop else []


def _own(folder: Path) -> None:
    """Create the folder, or check that only this user can use it."""
    try:
        make_folder(folder)
        found = folder.lstat()
        if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid():
            raise BadRequest(f"{folder} belongs to another user", param="disk_cache")
        folder.chmod(0o700)
        above = folder.parent.stat()
        if not (folder / BACKUP_MARK).exists():
            replace_own(folder / BACKUP_MARK, BACKUP_TEXT)
    except OSError as error:
        raise BadRequest(f"{folder} cannot be used: {error.strerror}", param="disk_cache") from None
    if found.st_mode & OTHERS_WRITE:
        log.warning("prefix cache: other users could write in %s until this start", folder)
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        log.warning("prefix cache: other users can replace %s: run `chmod go-w` above it", folder)
