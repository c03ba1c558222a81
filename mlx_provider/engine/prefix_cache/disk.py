"""The disk tier: stores prefixes for later processes, and more than fits into memory.

Two threads write segments during prefill and read them back; the engine thread decides, and creates
every array. A file never changes, is named by its content, and appears by rename, so processes may
share a folder. A file removed by another process is a miss.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import shutil
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...errors import BadRequest
from ...safe_open import make_folder, replace_own
from . import files
from .files import (
    BadFile,
    Call,
    Header,
    News,
    Reader,
    Tensor,
    Writer,
    allocated,
    device_array,
    host_tensors,
    list_files,
)
from .layers import ArrayPack, Snapshot
from .segments import RowFiller, RowParts
from .store import INSIDE, RECENT, Store
from .tree import CacheKey, Ids, Match, Walk, common, outside_spans, segment_of

log = logging.getLogger(__name__)

FOLDER = "prefixes"
FREE_SHARE = 0.1
MOST_BYTES = 20 * 10**9
EDGE = 512
"""Most tokens of a file: limits the memory to write or read it, and what is copied into a row
between two steps."""
MAX_QUEUED = 2**29
"""Most bytes that wait to be written. The rest of a prompt is written with a later pass."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
STALE = 3600.0
"""Seconds after which a temporary file counts as abandoned."""
BACKUP_MARK = "CACHEDIR.TAG"
BACKUP_TEXT = b"Signature: 8a477f597d28d172789f06886806bc55\n"
"""Marks the folder as a cache for backup programs (bford.info/cachedir)."""
Step = tuple[Header, int, int]
"""A segment's file, its first token, and the number of its tokens that match."""


def disk_limit(folder: Path, chosen: int | None) -> int:
    if chosen is not None:
        return chosen
    place = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
    free = shutil.disk_usage(place).free + bytes_on_disk(folder)
    return min(MOST_BYTES, int(FREE_SHARE * free))


def bytes_on_disk(folder: Path) -> int:
    return sum(allocated(of) for _, of in list_files((folder / FOLDER).glob("*")))


class Chain:
    """Digests of a key's tokens `[0, at)`, for ascending `at`."""

    def __init__(self, key: CacheKey, ids: Ids) -> None:
        self._ids = ids
        self._at = 0
        self._hash = hashlib.blake2b(key.digest(), digest_size=16)

    def at(self, position: int) -> str:
        if position < self._at:
            raise ValueError("digests are taken in ascending order")
        self._hash.update(self._ids[self._at : position].tobytes())
        self._at = position
        return self._hash.hexdigest()


@dataclass
class Index:
    """The files on disk, by the digest of the tokens before them."""

    segments: dict[str, dict[str, Header]] = field(default_factory=dict)
    states: dict[str, Header] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def add(self, header: Header) -> None:
        self.sizes[header.name] = header.nbytes
        if len(header.tokens):
            self.segments.setdefault(header.parent, {})[header.name] = header
        else:
            self.states[header.parent] = header

    def remove(self, name: str) -> None:
        self.sizes.pop(name, None)
        parent = name.partition("-")[0]
        self.segments.get(parent, {}).pop(name, None)
        if parent in self.states and self.states[parent].name == name:
            del self.states[parent]

    def walk(self, key: CacheKey, ids: Ids) -> list[Step]:
        chain, at, steps = Chain(key, ids), 0, []
        while at < len(ids):
            known = self.segments.get(chain.at(at), {}).values()
            fits = [(common(h.tokens, ids[at:]), h.complete, h.name, h) for h in known]
            took, _, _, header = max(fits, default=(0, False, "", None))
            if header is None or not took:
                break
            steps.append((header, at, took))
            at += took
        return steps

    def states_along(self, key: CacheKey, ids: Ids, limit: int) -> list[Header]:
        """Longest first."""
        own, limit = key.digest().hex(), min(limit, len(ids))
        known = self.states.values()
        stops = sorted({h.start for h in known if h.key == own and h.start <= limit})
        chain = Chain(key, ids)
        found = [self.states.get(chain.at(stop)) for stop in stops]
        return [header for header in reversed(found) if header is not None]


@dataclass(frozen=True)
class Stored:
    """A prefix of `length` tokens on disk, beyond the part in memory."""

    length: int
    segments: Sequence[Step]
    state: Header | None


@dataclass(eq=False)
class Restore:
    """Finds the part of a prompt that only the disk has, and fills a row with all that is stored.

    Engine thread only: the reader's thread calls it there.
    """

    disk: DiskTier
    store: Store
    key: CacheKey
    ids: Ids
    make_cache: Callable[[], list[Any]]
    room: int
    """Tokens of the row."""
    grid: int
    """The row resumes at a multiple of this."""
    ended: bool = False
    """Any thread may read this."""
    cache: list[Any] | None = None
    """The row cache once the restore has ended. `None`: nothing was restored."""
    length: int = 0
    _in_memory: int = 0
    _found: Stored | None = None
    _filler: RowFiller | None = None
    _reached: int = 0
    _stops: Mapping[str, int] = field(default_factory=dict)
    """Where the prompt leaves each segment, by the name of its file."""
    _state: Snapshot | None = None

    @property
    def available(self) -> int:
        """Tokens that a restore gives now. 0: memory has as many."""
        return self._find()[1].length

    def start(self) -> Restore:
        self.disk.read(self)
        return self

    def _find(self) -> tuple[Walk, Stored]:
        ids = self.ids[:-1]  # one token at least is prefilled
        walk = self.store.walk(self.key, ids)
        self._in_memory = Match.of(walk, self.ids).length // self.grid * self.grid
        complete = all(node.complete for node, _ in walk.steps)
        return walk, self.disk.find(
            self.key, ids, walk.shared, complete=complete, usable=self._usable
        )

    def _usable(self, length: int) -> int:
        """The largest length within `length` at which the row may resume. 0: memory has as many
        tokens."""
        at = outside_spans(self.ids, length)
        while at % self.grid:
            at = outside_spans(self.ids, at - at % self.grid)
        return at if at > self._in_memory else 0

    # -- steps of the reader

    def begin(self) -> Sequence[Header]:
        """The files to read, the state first, because nothing is usable without it."""
        if self.ended:
            return []
        walk, found = self._find()
        if not found.length:
            self.abandon()
            return []
        self.disk.touch(self.key, self.ids[: found.length])
        states = frozenset(leaf for leaf, _ in found.state.layers) if found.state else frozenset()
        room = self.room - found.length
        self._found = found
        self._filler = RowFiller(self.make_cache(), found.length, room, states)
        for node, agreed in walk.steps:
            stop = min(node.start + agreed, found.length)
            if node.start < stop:
                self._filler.put(segment_of(node).arrays(), node.start, stop, 0)
                self._reached = stop
        self._stops = {header.name: start + took for header, start, took in found.segments}
        segments = [header for header, _, _ in found.segments]
        return segments if found.state is None else [found.state, *segments]

    def take(self, header: Header, tensors: Sequence[Tensor]) -> bool:
        """Copy a file into the row. Returns whether the restore goes on."""
        if self.ended or self._filler is None or self._found is None:
            return False
        arrays = [device_array(each) for each in tensors]
        if len(header.tokens) == 0:
            self._state = Snapshot(dict(header.layers), ArrayPack.loose(arrays))
            return True
        by_leaf, at = dict[int, Sequence[Any]](), 0
        for leaf, count in header.layers:
            by_leaf[leaf] = arrays[at : at + count]
            at += count
        start = max(header.start, self._reached)
        stop = min(self._stops[header.name], self._found.length)
        self._filler.put(by_leaf, start, stop, start - header.start)
        self._reached = stop
        return True

    def stop(self, name: str, reason: BadFile | OSError) -> None:
        if self.ended:
            return
        self.disk.damaged(name, reason)
        useless = self._found is None or self._found.state is not None
        self._end(self._usable(0 if useless else self._reached))

    def finish(self) -> None:
        if self._found is not None:
            self._end(self._found.length)

    def abandon(self) -> None:
        """The request ended or the restore failed. Frees its memory at once."""
        self._end(0)

    def _end(self, length: int) -> None:
        if self.ended:
            return
        if length and self._filler is not None:
            self.cache = self._filler.finish(length, self._state)
            self.length = length
        self._found = self._filler = self._state = None
        self.ended = True


class DiskTier:
    """Engine thread only, except for the threads that it starts."""

    def __init__(
        self, folder: Path, limit: int, call: Call, *, versions: str | None = None
    ) -> None:
        """`call` runs a function on the engine thread. Raises `BadRequest` for a bad folder."""
        self.folder = folder / FOLDER
        self.limit = limit
        self.versions = files.versions() if versions is None else versions
        _own(self.folder)
        self._index = Index()
        self._read_headers()
        self._queued = 0
        self._written = 0
        self._skipped = 0
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        known = self._index.sizes.keys()
        self._writer = Writer(self.folder, limit, self.versions, self._news, known)
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
        self._writer.do(self._writer.touch, [*path])
        left = self.limit - sum(header.nbytes for header, _, _ in steps)
        stop = len(ids) if prompted is not None else len(ids) // EDGE * EDGE
        chain, own = Chain(key, ids), key.digest().hex()
        for start, end in pairwise(_cuts(covered, stop, prompted)):
            nbytes = (end - start) * row.token_bytes(complete=complete)
            size = _file_bytes(end - start, nbytes, len(row.shape(complete=complete)))
            if size > left or not self._takes(size):
                break
            segment = row.cut(start, end, complete=complete)
            parent, tokens = chain.at(start), ids[start:end]
            header = Header(own, parent, start, tokens, complete, segment.layers, size)
            self._write(header, host_tensors(segment.pack))
            path.append(header.name)
            left -= size
        if not complete:
            self._save_states(key, ids, states)
        self._writer.do(self._writer.touch, path)

    def _save_states(self, key: CacheKey, ids: Ids, states: Mapping[int, Snapshot]) -> None:
        chain, own = Chain(key, ids), key.digest().hex()
        for at, state in sorted(states.items()):
            digest = chain.at(at)
            if digest not in self._index.states and self._takes(state.nbytes):
                size = _file_bytes(0, state.nbytes, len(state.layers))
                layers = list(state.layers.items())
                header = Header(own, digest, at, ids[:0], False, layers, size)
                self._write(header, host_tensors(state.pack))
        every = self._index.states_along(key, ids, len(ids))
        for header in every[RECENT + INSIDE : -1]:  # the first and the last ones stay
            self._forget(header.name)

    def _takes(self, size: int) -> bool:
        fits = not self._queued or self._queued + size <= MAX_QUEUED
        self._skipped += not fits
        return fits

    def _write(self, header: Header, tensors: Sequence[Tensor]) -> None:
        nbytes = sum(tensor.data.nbytes for tensor in tensors)
        self._queued += nbytes
        self._index.add(header)
        self._writer.do(self._writer.write, header, tensors, nbytes)

    def touch(self, key: CacheKey, ids: Ids) -> None:
        names = [header.name for header, _, _ in self._index.walk(key, ids)]
        self._writer.do(self._writer.touch, names)

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
        return Stored(length, beyond, state)

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
        self._writer.do(self._writer.clear)

    def report(self) -> dict[str, Any]:
        """Files and bytes known to this process, and writes postponed because the disk was slow."""
        self._drain()
        return {
            "files": len(self._index.sizes),
            "bytes": sum(self._index.sizes.values()),
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
        self._writer.do(self._writer.remove, name)

    def _drain(self) -> None:
        while not self._news.empty():
            news = self._news.get()
            self._queued -= news.written
            if news.found is not None:
                self._index.add(news.found)
            elif news.removed:
                self._index.remove(news.removed)
            else:
                self._written += news.written

    def _read_headers(self) -> None:
        """Build the index. Removes damaged and abandoned files."""
        refused: dict[str, int] = {}
        ignored: dict[str, int] = {}
        for path in sorted(self.folder.iterdir()):
            try:
                if path.suffix == files.TEMPORARY and time.time() - path.lstat().st_mtime > STALE:
                    path.unlink(missing_ok=True)
                if path.suffix == files.SUFFIX:
                    if stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                        raise BadFile("no regular file")
                    self._index.add(files.read_header(path, self.versions))
            except BadFile as reason:
                refused[str(reason)] = refused.get(str(reason), 0) + 1
                path.unlink(missing_ok=True)
            except OSError as reason:
                ignored[str(reason.strerror)] = ignored.get(str(reason.strerror), 0) + 1
        for text, count in ignored.items():
            log.warning("prefix cache: %d files in %s ignored: %s", count, self.folder, text)
        for text, count in refused.items():
            log.warning("prefix cache: %d files on disk ignored and removed: %s", count, text)


def _file_bytes(tokens: int, nbytes: int, layers: int) -> int:
    return nbytes + 12 * tokens + 2**11 + 2**8 * layers


def _cuts(start: int, stop: int, prompted: int | None) -> list[int]:
    edges = {*range(start // EDGE * EDGE + EDGE, stop, EDGE), prompted or 0}
    return sorted({at for at in edges if start < at < stop} | {start, stop}) if start < stop else []


def _own(folder: Path) -> None:
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
