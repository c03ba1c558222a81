"""The disk tier: stores prefixes for later processes, and more than fits into memory.

A thread writes segments during prefill and reads them back; the engine thread decides, and creates
every array. A file never changes, is named by its content, and appears by rename, so processes may
share a folder. A file removed by another process is a miss. The limit is that of one process, which
counts the files that it found at its start and those it wrote.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...errors import BadRequest, EngineDied
from ...isolation import Fault, Isolation
from ...safe_open import make_folder, replace_own
from . import files
from .files import Arrays, BadFile, Header, Writer, device_arrays, host_arrays, list_files
from .paths import FORKS, RECENT
from .segments import ArrayPack, RowFiller, RowParts, Snapshot
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
Filling = Generator[Header, Arrays, tuple[list[Any] | None, int]]
"""Yields the files that it needs, and gets their arrays. Returns a row cache and its tokens."""
Call = Callable[[Callable[[], Any]], Future[Any]]
"""Runs a function on the engine thread, between steps."""


def disk_limit(folder: Path, chosen: int | None) -> int:
    if chosen is not None:
        return chosen
    place = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
    free = shutil.disk_usage(place).free + bytes_on_disk(folder)
    return min(MOST_BYTES, int(FREE_SHARE * free))


def bytes_on_disk(folder: Path) -> int:
    """Holes in a file take none."""
    files = list_files(folder / FOLDER)
    return sum(min(of.st_size, 512 * of.st_blocks) for _, of in files)


def digests(key: CacheKey, ids: Ids) -> Callable[[int], str]:
    """A function that digests key and tokens `[0, at)`, for ascending `at`."""
    state, done = hashlib.blake2b(key.digest(), digest_size=16), 0

    def digest(at: int) -> str:
        nonlocal done
        state.update(ids[done:at].tobytes())
        done = at
        return state.hexdigest()

    return digest


class Index:
    """The files on disk by name, and what a path needs to find them."""

    def __init__(self) -> None:
        self.files: dict[str, Header] = {}
        """The least recently used first."""
        self.nbytes = 0
        self._segments: dict[tuple[str, int], set[str]] = {}
        """Their names, by the digest of the tokens before them and their first token."""
        self._states: dict[str, Counter[int]] = {}
        """How many snapshots have so many tokens, by the digest of the tokens before these."""

    def add(self, header: Header) -> None:
        self.remove(header.name)
        self.files[header.name] = header
        self.nbytes += header.nbytes
        if header.state:
            self._states.setdefault(header.parent, Counter())[len(header.tokens)] += 1
        else:
            first = header.parent, int(header.tokens[0])
            self._segments.setdefault(first, set()).add(header.name)

    def remove(self, name: str) -> None:
        if (header := self.files.pop(name, None)) is None:
            return
        self.nbytes -= header.nbytes
        parent = name.partition("-")[0]
        if header.state:
            self._states[parent] -= Counter([len(header.tokens)])
        else:
            self._segments[parent, int(header.tokens[0])].discard(name)

    def touch(self, path: Sequence[Header]) -> list[str]:
        """The path's first file becomes the newest, so that the tail is removed first."""
        names = [header.name for header in reversed(path) if header.name in self.files]
        self.files |= {name: self.files.pop(name) for name in names}
        return names

    def walk(self, key: CacheKey, ids: Ids, shared: int = 0) -> tuple[list[Step], list[Step]]:
        """The segments of a path, and the snapshots within them or its first `shared` tokens, the
        longest first. It looks after each segment and each multiple of `EDGE`, where the tokens of
        a snapshot begin."""
        digest, at, end = digests(key, ids), 0, 0
        steps, states = list[Step](), list[Step]()
        while at <= max(end, shared) and at < len(ids):
            parent = digest(at)
            known = self._segments.get((parent, int(ids[at])), ()) if at == end else ()
            found = [self.files[name] for name in known]
            fits = [(common(h.tokens, ids[at:]), h.complete, h.name, h) for h in found]
            for took, _, _, header in sorted(fits)[-1:]:
                end += took
                steps.append((header, at, end))
            for count in sorted(self._states.get(parent, ())):
                state = Header("", parent, at, ids[at : at + count], False, (), state=True)
                if at + count <= len(ids) and state.name in self.files:
                    states.append((self.files[state.name], at, at + count))
            edge = at // EDGE * EDGE + EDGE
            at = end if at < end < edge else edge
        return steps, [state for state in reversed(states) if state[2] <= max(end, shared)]


class Restore:
    """Fills a row with all that is stored of a prompt, of which the disk has more than memory.

    Engine thread only. It reads one file after another, so that steps of other requests run in
    between.
    """

    def __init__(self, disk: DiskTier, fill: Filling) -> None:
        self.ended = False
        """Any thread may read this."""
        self.cache: list[Any] | None = None
        """The row cache once the restore has ended. `None`: nothing was restored."""
        self.length = 0
        self._disk = disk
        self._fill = fill
        self._then(partial(next, fill), priority=1)  # all that it finds is written before it reads

    def abandon(self) -> None:
        """The request ended or the restore failed. Frees its memory at once."""
        self.ended = True
        self._fill.close()

    def _advance(self, step: Callable[[], Header], priority: int) -> None:
        """Engine thread."""
        if self.ended:
            return
        with Isolation(self._failed):
            try:
                header = step()
            except StopIteration as end:
                self.ended, (self.cache, self.length) = True, end.value
            else:
                self._disk.writer.do(partial(self._read, header), priority=priority)

    def _read(self, header: Header) -> None:
        """Disk thread."""
        try:
            step = partial(self._fill.send, self._disk.writer.read(header))
        except (BadFile, OSError) as reason:
            step = partial(self._fill.throw, reason)
        self._then(step)

    def _then(self, step: Callable[[], Header], priority: int = 0) -> None:
        try:
            self._disk.call(partial(self._advance, step, priority))
        except EngineDied:
            self.abandon()

    def _failed(self, fault: Fault) -> None:
        log.error("prefix cache: a prefix could not be read from disk\n%s", fault.trace)
        self.abandon()


def usable(ids: Ids, length: int, match: Match, grid: int) -> int:
    """The largest multiple of `grid` within `length` at which a row may resume. 0: memory has as
    many tokens."""
    at = outside_spans(ids, length, grid)
    return at if at > match.length // grid * grid else 0


class DiskTier:
    """Engine thread only, except for the thread that it starts."""

    def __init__(
        self, folder: Path, limit: int, call: Call, *, versions: str | None = None
    ) -> None:
        """`call` runs a function on the engine thread. Raises `BadRequest` for a bad folder."""
        self.folder = folder / FOLDER
        self.limit = limit
        self.versions = files.versions() if versions is None else versions
        self.call = call
        _own(self.folder)
        self.index = Index()
        self._read_headers()
        self._sent = self._skipped = 0
        """Bytes handed to the thread, and writes postponed because the disk was slow."""
        self.writer = Writer(self.folder, self.versions)
        self._shrink()

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
        steps, known = self.index.walk(key, ids, len(ids))
        covered = steps[-1][2] if steps else 0
        complete = row.complete and all(header.complete for header, _, _ in steps)
        row = row.stored(complete=complete)
        path = [header for header, _, _ in steps]
        left = self.limit - sum(header.nbytes for header in path)
        stop = len(ids) if prompted is not None else len(ids) // EDGE * EDGE
        digest, own = digests(key, ids), key.digest().hex()
        for start, end in pairwise(_cuts(covered, stop, prompted)):
            segment, tokens = row.cut(start, end), ids[start:end]
            header = Header(own, digest(start), start, tokens, complete, segment.layers)
            if not self._write(header, segment.pack, left):
                break
            path.append(header)
            left -= self.index.files[header.name].nbytes
        if states and not complete:
            digest, ends = digests(key, ids), {end for _, _, end in known}
            for at, state in sorted(states.items()):
                start = (at - 1) // EDGE * EDGE
                layers, tokens = list(state.layers.items()), ids[start:at]
                header = Header(own, digest(start), start, tokens, False, layers, state=True)
                if at not in ends:
                    self._write(header, state.pack, self.limit)
            _, every = self.index.walk(key, ids, len(ids))
            for header, _, _ in every[RECENT + FORKS : -1]:  # the first and the last ones stay
                self._forget(header.name)
        self.writer.do(partial(self.writer.touch, self.index.touch(path)))
        self._shrink()

    def _write(self, header: Header, pack: ArrayPack, left: int) -> bool:
        """Queue a file, if it has at most `left` bytes and the disk is fast enough."""
        tokens, layers = len(header.tokens), len(header.layers)
        header = replace(header, nbytes=pack.nbytes + 12 * tokens + 2**11 + 2**8 * layers)
        queued = self._sent - self.writer.done
        slow = queued > 0 and queued + header.nbytes > MAX_QUEUED
        self._skipped += slow
        if slow or header.nbytes > left:
            return False
        self._sent += pack.nbytes
        self.index.add(header)

        def failed() -> None:
            """Disk thread."""
            with suppress(EngineDied):
                self.call(partial(self.index.remove, header.name))

        self.writer.do(partial(self.writer.write, header, host_arrays(pack), failed))
        return True

    # -- reading

    def find(self, key: CacheKey, ids: Ids, match: Match, grid: int) -> tuple[int, list[Step]]:
        """The longest prefix of `ids` from which a row can resume, and its files. 0: memory has as
        much, which is `match`. At least one token is left to prefill."""
        steps, states = self.index.walk(key, ids[:-1], match.shared)
        needed: list[Step] = []
        if match.complete and all(header.complete for header, _, _ in steps):
            covered = max(match.shared, steps[-1][2] if steps else 0)
            length = usable(ids, covered, match, grid)
        else:
            needed = [s for s in states if usable(ids, s[2], match, grid) == s[2]][:1]
            length = needed[0][2] if needed else 0
        return length, needed + [s for s in steps if s[1] < length and s[2] > match.shared]

    def fill(
        self,
        key: CacheKey,
        ids: Ids,
        matches: Callable[[], Match],
        make_cache: Callable[[], list[Any]],
        room: int,
        grid: int = 1,
    ) -> Filling:
        """`matches`: what memory has. `room`: tokens of the row, which resumes at a multiple of
        `grid`."""
        match = matches()
        goal, steps = self.find(key, ids, match, grid)
        if not goal:
            return None, 0
        path = self.index.touch([h for h, _, _ in self.index.walk(key, ids[:goal])[0]])
        self.writer.do(partial(self.writer.touch, path))
        first = steps[0][0]
        states = [leaf for leaf, _ in first.layers] if first.state else ()
        filler, snapshot, reached = RowFiller(make_cache(), goal, room - goal, states), None, 0
        for node, agreed in match.steps:
            stop = min(node.start + agreed, goal)
            if node.start < stop:
                filler.put(segment_of(node).arrays(), node.start, stop, 0)
                reached = stop
        for header, start, stop in steps:
            try:
                arrays = device_arrays((yield header))
            except (BadFile, OSError) as reason:
                self._report_damage(header.name, reason)
                goal = 0 if states else usable(ids, reached, match, grid)
                break
            if header.state:
                snapshot = Snapshot(dict(header.layers), ArrayPack.loose(arrays))
                continue
            begin, reached = max(start, reached), min(stop, goal)
            by_leaf = {x: [arrays.pop(0) for _ in range(count)] for x, count in header.layers}
            filler.put(by_leaf, begin, reached, begin - start)
            del by_leaf
        return (filler.finish(goal, snapshot), goal) if goal else (None, 0)

    def _report_damage(self, name: str, reason: BadFile | OSError) -> None:
        if isinstance(reason, FileNotFoundError):  # another process removed it
            self.index.remove(name)
            return
        log.warning("prefix cache: %s is ignored and removed: %s", self.folder / name, reason)
        self._forget(name)

    # -- the folder

    def clear(self) -> None:
        self.index = Index()
        self.writer.do(self.writer.clear)

    def report(self) -> dict[str, Any]:
        """Files and bytes known to this process."""
        return {
            "files": len(self.index.files),
            "bytes": self.index.nbytes,
            "limit": self.limit,
            "skipped": self._skipped,
        }

    def _forget(self, name: str) -> None:
        self.index.remove(name)
        self.writer.do(partial(self.writer.remove, name))

    def _shrink(self) -> None:
        """Files that other processes wrote since the start do not count."""
        while self.index.nbytes > self.limit:
            self._forget(next(iter(self.index.files)))

    def _read_headers(self) -> None:
        """Build the index. Removes damaged and abandoned files."""
        refused = Counter[str]()
        found = sorted(list_files(self.folder), key=lambda each: each[1].st_mtime_ns)
        for path, of in found:
            try:
                if path.name.startswith("tmp") and time.time() - of.st_mtime > STALE:
                    path.unlink(missing_ok=True)
                if path.suffix == files.SUFFIX:
                    if stat.S_IFMT(of.st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                        raise BadFile("no regular file")
                    self.index.add(files.read_header(path, self.versions))
            except BadFile as reason:
                refused[f"removed: {reason}"] += 1
                path.unlink(missing_ok=True)
            except OSError as reason:
                refused[str(reason.strerror)] += 1
        for text, count in refused.items():
            log.warning("prefix cache: %d files in %s ignored: %s", count, self.folder, text)


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
