"""The disk tier: stores prefixes for later processes, and more than fits into memory.

A thread writes segments during prefill and reads them back; the engine thread decides, and creates
every array. A file never changes, is named by its content, and appears by rename, so processes may
share a folder. A file removed by another process is a miss.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...errors import BadRequest, EngineDied
from ...isolation import Fault, Isolation
from ...safe_open import make_folder, replace_own
from . import files
from .files import (
    BadFile,
    Header,
    Tensor,
    Writer,
    allocated,
    device_array,
    host_tensors,
    list_files,
)
from .segments import ArrayPack, RowFiller, RowParts, Snapshot
from .store import INSIDE, RECENT, Store
from .tree import CacheKey, Ids, Match, common, outside_spans, segment_of

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
"""A file, its first token (a damaged header may name another), and where the prompt leaves it."""
Call = Callable[[Callable[[], Any]], Future[Any]]
"""Runs a function on the engine thread, between steps."""


def disk_limit(folder: Path, chosen: int | None) -> int:
    if chosen is not None:
        return chosen
    place = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
    free = shutil.disk_usage(place).free + bytes_on_disk(folder)
    return min(MOST_BYTES, int(FREE_SHARE * free))


def bytes_on_disk(folder: Path) -> int:
    return sum(allocated(of) for _, of in list_files((folder / FOLDER).glob("*")))


def digests(key: CacheKey, ids: Ids) -> Callable[[int], str]:
    """A function that digests key and tokens `[0, at)`, for ascending `at`."""
    state, done = hashlib.blake2b(key.digest(), digest_size=16), 0

    def digest(at: int) -> str:
        nonlocal done
        state.update(ids[done:at].tobytes())
        done = at
        return state.hexdigest()

    return digest


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
        digest, at, steps = digests(key, ids), 0, []
        while at < len(ids):
            known = self.segments.get(digest(at), {}).values()
            fits = [(common(h.tokens, ids[at:]), h.complete, h.name, h) for h in known]
            took, _, _, header = max(fits, default=(0, False, "", None))
            if header is None or not took:
                break
            steps.append((header, at, at + took))
            at += took
        return steps

    def states_along(self, key: CacheKey, ids: Ids, limit: int) -> list[Header]:
        """Longest first."""
        own, limit = key.digest().hex(), min(limit, len(ids))
        known = self.states.values()
        stops = sorted({h.start for h in known if h.key == own and h.start <= limit})
        digest = digests(key, ids)
        found = [self.states.get(digest(stop)) for stop in stops]
        return [header for header in reversed(found) if header is not None]


@dataclass(eq=False)
class Restore:
    """Finds the part of a prompt that only the disk has, and fills a row with all that is stored.

    Engine thread only. It reads one file after another, so that steps of other requests run in
    between.
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
    _filler: RowFiller | None = None
    _stateful: bool = False
    """Whether nothing is usable without a state from disk."""
    _reached: int = 0
    """Tokens of the row that are filled."""
    _goal: int = 0
    _steps: list[Step] = field(default_factory=list)
    """Files to read, the state first."""
    _state: Snapshot | None = None
    _waited: bool = False
    """Whether all was written that waited when it began."""

    @property
    def available(self) -> int:
        """Tokens that a restore gives now. 0: memory has as many."""
        return self._find()[1]

    def start(self) -> Restore:
        self.disk.on_engine_thread(self, self._begin)
        return self

    def abandon(self) -> None:
        """The request ended or the restore failed. Frees its memory at once."""
        self._end(0)

    def _find(self) -> tuple[Match, int, list[Step]]:
        """What memory has, the tokens with which the row can resume, and the files they need."""
        ids = self.ids[:-1]  # one token at least is prefilled
        match = self.store.match(self.key, self.ids, len(ids))
        self._in_memory = match.length // self.grid * self.grid
        return match, *self.disk.find(self.key, ids, match, self._usable)

    def _usable(self, length: int) -> int:
        """The largest length within `length` at which the row may resume. 0: memory has as many
        tokens."""
        at = outside_spans(self.ids, length)
        while at % self.grid:
            at = outside_spans(self.ids, at - at % self.grid)
        return at if at > self._in_memory else 0

    def _begin(self) -> None:
        match, self._goal, self._steps = self._find()
        if not self._goal:
            return self.abandon()
        self.disk.touch(self.key, self.ids[: self._goal])
        state = next((header for header, _, _ in self._steps if not len(header.tokens)), None)
        states = frozenset(leaf for leaf, _ in state.layers) if state else frozenset()
        self._stateful = state is not None
        room = self.room - self._goal
        self._filler = RowFiller(self.make_cache(), self._goal, room, states)
        for node, agreed in match.steps:
            stop = min(node.start + agreed, self._goal)
            if node.start < stop:
                self._filler.put(segment_of(node).arrays(), node.start, stop, 0)
                self._reached = stop
        return self._read()

    def _read(self) -> None:
        if self._steps:
            self.disk.read(self, *self._steps.pop(0), first=not self._waited)
            self._waited = True
        else:
            self._end(self._goal)

    def take(self, header: Header, start: int, stop: int, tensors: Sequence[Tensor]) -> None:
        """Copy a file into the row."""
        if self.ended or self._filler is None:
            return None
        arrays = [device_array(each) for each in tensors]
        if len(header.tokens) == 0:
            self._state = Snapshot(dict(header.layers), ArrayPack.loose(arrays))
            return self._read()
        by_leaf, at = dict[int, Sequence[Any]](), 0
        for leaf, count in header.layers:
            by_leaf[leaf] = arrays[at : at + count]
            at += count
        first, stop = max(start, self._reached), min(stop, self._goal)
        self._filler.put(by_leaf, first, stop, first - start)
        self._reached = stop
        return self._read()

    def stop(self, name: str, reason: BadFile | OSError) -> None:
        if not self.ended:
            self.disk.damaged(name, reason)
            self._end(0 if self._stateful else self._usable(self._reached))

    def _end(self, length: int) -> None:
        if self.ended:
            return
        if length and self._filler is not None:
            self.cache = self._filler.finish(length, self._state)
            self.length = length
        self._filler = self._state = None
        self.ended = True


class DiskTier:
    """Engine thread only, except for the thread that it starts."""

    def __init__(
        self, folder: Path, limit: int, call: Call, *, versions: str | None = None
    ) -> None:
        """`call` runs a function on the engine thread. Raises `BadRequest` for a bad folder."""
        self.folder = folder / FOLDER
        self.limit = limit
        self.versions = files.versions() if versions is None else versions
        _own(self.folder)
        self._call = call
        self._index = Index()
        self._read_headers()
        self._sent = 0
        """Bytes handed to the thread."""
        self._skipped = 0
        self._writer = Writer(self.folder, limit, self.versions, self._index.sizes.keys())

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
        covered = steps[-1][2] if steps else 0
        complete = row.complete and all(header.complete for header, _, _ in steps)
        row = row.stored(complete=complete)
        path = [header.name for header, _, _ in steps]
        self._touch([*path])
        left = self.limit - sum(header.nbytes for header, _, _ in steps)
        stop = len(ids) if prompted is not None else len(ids) // EDGE * EDGE
        digest, own = digests(key, ids), key.digest().hex()
        for start, end in pairwise(_cuts(covered, stop, prompted)):
            nbytes = (end - start) * row.token_bytes
            size = _file_bytes(end - start, nbytes, len(row.shape))
            if size > left or not self._takes(size):
                break
            segment = row.cut(start, end)
            parent, tokens = digest(start), ids[start:end]
            header = Header(own, parent, start, tokens, complete, segment.layers, size)
            self._write(header, host_tensors(segment.pack))
            path.append(header.name)
            left -= size
        if not complete:
            self._save_states(key, ids, states)
        self._touch(path)

    def _save_states(self, key: CacheKey, ids: Ids, states: Mapping[int, Snapshot]) -> None:
        digest, own = digests(key, ids), key.digest().hex()
        for at, state in sorted(states.items()):
            parent = digest(at)
            if parent not in self._index.states and self._takes(state.nbytes):
                size = _file_bytes(0, state.nbytes, len(state.layers))
                layers = list(state.layers.items())
                header = Header(own, parent, at, ids[:0], False, layers, size)
                self._write(header, host_tensors(state.pack))
        every = self._index.states_along(key, ids, len(ids))
        for header in every[RECENT + INSIDE : -1]:  # the first and the last ones stay
            self._forget(header.name)

    def _takes(self, size: int) -> bool:
        queued = self._sent - self._writer.done
        fits = not queued or queued + size <= MAX_QUEUED
        self._skipped += not fits
        return fits

    def _write(self, header: Header, tensors: Sequence[Tensor]) -> None:
        self._sent += sum(tensor.data.nbytes for tensor in tensors)
        self._index.add(header)
        self._writer.do(partial(self._writer.write, header, tensors))

    def touch(self, key: CacheKey, ids: Ids) -> None:
        self._touch([header.name for header, _, _ in self._index.walk(key, ids)])

    def _touch(self, names: Sequence[str]) -> None:
        self._writer.do(partial(self._writer.touch, names))

    # -- reading

    def find(
        self,
        key: CacheKey,
        ids: Ids,
        match: Match,
        usable: Callable[[int], int],
    ) -> tuple[int, list[Step]]:
        """The longest prefix of `ids` from which a row can resume, and its files. `match`: what
        memory has. `usable`: maps a length to the largest length at which a row may resume."""
        self._drain()
        steps = self._index.walk(key, ids)
        covered = max(match.shared, steps[-1][2] if steps else 0)
        if match.complete and all(header.complete for header, _, _ in steps):
            length, needed = usable(covered), list[Step]()
        else:
            along = self._index.states_along(key, ids, covered)
            state = next((each for each in along if usable(each.start) == each.start), None)
            if state is None:
                return 0, []
            length, needed = state.start, [(state, state.start, state.start)]
        return length, needed + [s for s in steps if s[1] < length and s[2] > match.shared]

    def read(self, restore: Restore, header: Header, start: int, stop: int, *, first: bool) -> None:
        """Hand a file to a restore: the first one once all is written that waits, later ones before
        anything else."""

        def job() -> None:
            try:
                taken = partial(restore.take, header, start, stop, self._writer.read(header))
            except (BadFile, OSError) as reason:
                taken = partial(restore.stop, header.name, reason)
            self.on_engine_thread(restore, taken)

        self._writer.do(job, priority=int(first))

    def on_engine_thread(self, restore: Restore, step: Callable[[], None]) -> None:
        """Any thread. A restore whose step fails has found nothing."""

        def failed(fault: Fault) -> None:
            log.error("prefix cache: a prefix could not be read from disk\n%s", fault.trace)
            restore.abandon()

        def isolated() -> None:
            with Isolation(failed):
                step()

        try:
            self._call(isolated)
        except EngineDied:
            restore.abandon()

    def damaged(self, name: str, reason: BadFile | OSError) -> None:
        if isinstance(reason, FileNotFoundError):  # another process removed it
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
            "written_bytes": self._writer.written,
            "skipped": self._skipped,
        }

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _forget(self, name: str) -> None:
        self._index.remove(name)
        self._writer.do(partial(self._writer.remove, name))

    def _drain(self) -> None:
        while not self._writer.news.empty():
            news = self._writer.news.get()
            if isinstance(news, Header):
                self._index.add(news)
            else:
                self._index.remove(news)

    def _read_headers(self) -> None:
        """Build the index. Removes damaged and abandoned files."""
        refused, ignored = Counter[str](), Counter[str]()
        for path in sorted(self.folder.iterdir()):
            try:
                if path.suffix == files.TEMPORARY and time.time() - path.lstat().st_mtime > STALE:
                    path.unlink(missing_ok=True)
                if path.suffix == files.SUFFIX:
                    if stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                        raise BadFile("no regular file")
                    self._index.add(files.read_header(path, self.versions))
            except BadFile as reason:
                refused[str(reason)] += 1
                path.unlink(missing_ok=True)
            except OSError as reason:
                ignored[str(reason.strerror)] += 1
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
