"""The disk tier: what the prefix cache kept, for the next process.

Files are written by a thread of its own from copies on the host; the engine thread only reads.
A file never changes, has a name made from its content, and appears by rename, so any number of
processes may share a folder, and find what the others have written: at worst one finds that another
removed a file, which is a miss.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BadRequest
from . import files
from .disk_index import Chain, Index, Step
from .files import BadFile, Header, HostArray
from .key import CacheKey, Ids
from .segments import Segment
from .snapshots import Snapshot
from .tree import Node
from .writer import Writer

log = logging.getLogger(__name__)

FOLDER = "prefixes"
MAX_QUEUED = 2**30
"""Bytes that may wait to be written; what comes on top is not written."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
STALE = 3600.0
"""Seconds after which a temporary file belongs to a process that died."""


Readable = tuple[int, list[Step], Header | None]
"""Tokens, the files of their segments, and that of the state at their end."""


@dataclass(frozen=True)
class Loaded:
    """A prefix of `length` tokens, as far as memory did not have it."""

    length: int
    parts: Mapping[int, Segment]
    """By first position."""
    complete: bool
    states: Mapping[int, Snapshot]


class DiskTier:
    """Engine thread only, but for the writer it starts. Raises `BadRequest` for a bad folder."""

    def __init__(self, folder: Path, limit: int, *, versions: str | None = None) -> None:
        self.folder = folder / FOLDER
        self.limit = limit
        self.versions = files.versions() if versions is None else versions
        _own(self.folder)
        self._index = Index()
        self._build_index()
        self._queued = 0
        self._skipped = 0
        self._news: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Header] = queue.SimpleQueue()
        known = self._index.names
        self._writer = Writer(self.folder, limit, self.versions, self._news, self._found, known)

    def save(self, key: CacheKey, path: Sequence[Node], pruned: Sequence[int]) -> None:
        """Queue what of a path is not on disk yet, and the removal of pruned snapshots."""
        self._drain()
        ids = _ids(path)
        covered = sum(took for _, _, took in self._index.walk(key, ids))
        own, gone, chain = key.digest().hex(), set(pruned), Chain(key, ids)
        for node in path:
            first = max(node.start, covered)
            if first < node.stop and isinstance(node.segment, Segment):
                segment = node.segment
                if first > node.start:
                    segment = segment.slice(first - node.start, segment.length)
                tokens, shape = ids[first : node.stop], files.segment_structure(segment)
                head = Header(own, chain.at(first), first, tokens, node.complete, shape)
                self._write(head, segment.pack)
            if not isinstance(node.snapshot, Snapshot) and node.stop not in gone:
                continue
            digest = chain.at(node.stop)
            if isinstance(node.snapshot, Snapshot):
                shape = files.snapshot_structure(node.snapshot)
                head = Header(own, digest, node.stop, ids[:0], False, shape)
                self._write(head, node.snapshot.pack)
            elif digest in self._index.states:
                self._forget(self._index.states[digest].name)
        self._writer.touch([header.name for header, _, _ in self._index.walk(key, ids)])

    def load(
        self,
        key: CacheKey,
        ids: Ids,
        shared: int,
        have: int,
        *,
        complete: bool,
        budget: int,
    ) -> Loaded | None:
        """Read the longest prefix of `ids`, of at most `budget` bytes, that lets a row resume
        beyond `have` tokens.

        Memory already has the segments of `shared` tokens; `complete`: with every layer.
        """
        self._drain()
        steps = self._index.walk(key, ids)
        complete = complete and all(header.complete for header, _, _ in steps)
        beyond = [step for step in steps if step[1] + step[2] > shared]
        if complete:
            length, needed, state = self._segments_within(budget, beyond)
        else:
            covered = max(shared, sum(took for _, _, took in steps))
            states = self._index.states_along(key, ids, covered)
            length, needed, state = self._state_within(budget, beyond, states)
        if length <= have:
            return None
        heads = [header for header, _, _ in needed] + ([] if state is None else [state])
        read = [self._read(header) for header in heads]
        self._writer.touch([header.name for header, _, _ in steps])
        if any(arrays is None for arrays in read):
            return None
        return _loaded(length, complete, needed, state, [a for a in read if a is not None])

    def _segments_within(self, budget: int, beyond: Sequence[Step]) -> Readable:
        """The longest head of at most `budget` bytes."""
        sizes = accumulate(self._size(header) for header, _, _ in beyond)
        needed = [step for step, size in zip(beyond, sizes, strict=True) if size <= budget]
        return sum(needed[-1][1:]) if needed else 0, needed, None

    def _state_within(
        self, budget: int, beyond: Sequence[Step], states: Sequence[Header]
    ) -> Readable:
        """The segments up to the last state with which they take at most `budget` bytes."""
        sizes = {header.name: self._size(header) for header, _, _ in beyond}
        for state in states:
            needed = [step for step in beyond if step[1] < state.start]
            size = self._size(state) + sum(sizes[header.name] for header, _, _ in needed)
            if size <= budget:
                return state.start, needed, state
        return 0, [], None

    def clear(self) -> None:
        """Remove every file."""
        self._drain()
        self._index = Index()
        self._writer.clear()

    def report(self) -> dict[str, Any]:
        """Files known to this process, and writes left out because the disk was too slow."""
        self._drain()
        return {"files": len(self._index.names), "limit": self.limit, "skipped": self._skipped}

    def flush(self) -> None:
        """Wait until all that is queued is on disk."""
        self._writer.flush()

    def close(self) -> None:
        """Finish the queue and end the thread."""
        self._writer.close()

    def _write(self, header: Header, pack: Any) -> None:
        if header.name in self._index.names:
            return
        if self._queued + pack.nbytes > min(MAX_QUEUED, self.limit):
            self._skipped += 1
            return
        self._queued += pack.nbytes
        self._index.add(header)
        self._writer.write(header, files.to_host(pack), pack.nbytes)

    def _read(self, header: Header) -> list[HostArray] | None:
        path = self.folder / header.name
        try:
            return files.read(path, self.versions)[1]
        except FileNotFoundError:  # not written yet, or removed by another process
            if not self._queued:
                self._index.remove(header.name)
        except (BadFile, OSError) as reason:
            log.warning("prefix cache: %s is ignored and removed: %s", path, reason)
            self._forget(header.name)
        return None

    def _size(self, header: Header) -> int:
        try:
            return (self.folder / header.name).stat().st_size
        except OSError:
            return 0

    def _forget(self, name: str) -> None:
        self._index.remove(name)
        self._writer.remove(name)

    def _drain(self) -> None:
        """Take the writer's news: bytes written, files gone, files of other processes."""
        while not self._found.empty():
            self._index.add(self._found.get())
        while not self._news.empty():
            gone, written = self._news.get()
            self._queued -= written
            if gone:
                self._index.remove(gone)

    def _build_index(self) -> None:
        refused: dict[str, int] = {}
        ignored: dict[str, int] = {}
        for path in sorted(self.folder.iterdir()):
            try:
                if path.suffix == files.TEMPORARY and time.time() - path.lstat().st_mtime > STALE:
                    path.unlink(missing_ok=True)
                if path.suffix == files.SUFFIX:
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


def _ids(path: Sequence[Node]) -> Ids:
    return np.concatenate([node.tokens for node in path])


def _loaded(
    length: int,
    complete: bool,
    needed: Sequence[Step],
    state: Header | None,
    read: Sequence[list[HostArray]],
) -> Loaded:
    parts = {}
    for (header, start, took), arrays in zip(needed, read, strict=False):
        segment = files.segment_of(header, arrays)
        parts[start] = segment if took == segment.length else segment.slice(0, took)
    states = {} if state is None else {state.start: files.snapshot_of(state, read[-1])}
    return Loaded(length, parts, complete, states)


def _own(folder: Path) -> None:
    """Make the folder, or see that it is this user's alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid():
            raise BadRequest(f"{folder} belongs to another user", param="disk_cache")
        folder.chmod(0o700)
        above = folder.parent.stat()
    except OSError as error:
        raise BadRequest(f"{folder} cannot be used: {error.strerror}", param="disk_cache") from None
    if found.st_mode & OTHERS_WRITE:
        log.warning("prefix cache: other users could write in %s until this start", folder)
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        log.warning("prefix cache: other users can replace %s: run `chmod go-w` above it", folder)
