"""The disk tier: stores prefixes for later processes, and more than fits into memory.

The engine thread decides what is written and read, and creates every array; the thread of `files`
does it. The limit is that of one process, which counts the files that it found at its start and
those it wrote."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...errors import EngineDied
from ...isolation import Fault, attempt
from . import files
from .eviction import FORKS, RECENT
from .files import Arrays, BadFile, DiskThread, Header, device_arrays, host_arrays
from .segments import RowFiller, Segment, Snapshot
from .tree import CacheKey, Ids, Match, common, outside_spans

log = logging.getLogger(__name__)

EDGE = 512
"""Most tokens of a file: limits the memory to write or read it, and what is copied into a row
between two steps."""
MAX_QUEUED = 2**29
"""Most bytes that wait to be written. The rest of a prompt is written with a later pass."""
Step = tuple[Header, int, int]
"""A file and the tokens `[start, stop)` of a prompt in it. A damaged header may name others."""
Filling = Generator[Header, Arrays, tuple[list[Any] | None, int]]
"""Yields the files that it needs, and gets their arrays. Returns a row cache and its tokens."""
Call = Callable[[Callable[[], Any]], Future[Any]]
"""Runs a function on the engine thread, between steps."""


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
        self._states: Counter[int] = Counter()
        """The number of snapshots, by token count."""

    def add(self, header: Header) -> None:
        self.remove(header.name)
        self.files[header.name] = header
        self.nbytes += header.nbytes
        if header.state:
            self._states[header.start] += 1
        else:
            first = header.parent, int(header.tokens[0])
            self._segments.setdefault(first, set()).add(header.name)

    def remove(self, name: str) -> None:
        if (header := self.files.pop(name, None)) is None:
            return
        self.nbytes -= header.nbytes
        if header.state:
            self._states -= Counter([header.start])
        else:
            self._segments[header.parent, int(header.tokens[0])].discard(name)

    def walk(self, key: CacheKey, ids: Ids, shared: int = 0) -> tuple[list[Step], list[Header]]:
        """The segments of a path, and snapshots of it or of `shared` tokens, longest first."""
        digest, end, steps = digests(key, ids), 0, list[Step]()
        while end < len(ids) and (names := self._segments.get((digest(end), int(ids[end])))):
            agreed, name = max((common(self.files[n].tokens, ids[end:]), n) for n in names)
            steps.append((self.files[name], end, end + agreed))
            end += agreed
        digest = digests(key, ids)
        ends = sorted(at for at in self._states if at <= max(end, shared))
        found = (self.files.get(files.snapshot_name(digest(at))) for at in ends)
        states = [header for header in found if header is not None]
        return steps, states[::-1]


class Restore:
    """Fills a row with all that is stored of a prompt, of which the disk has more than memory.
    Engine thread only. It reads one file after another, and other requests run in between."""

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
        if not self.ended and (fault := attempt(partial(self._take, step, priority))):
            fault.log("prefix cache: reading a prefix from disk")
            self.abandon()

    def _take(self, step: Callable[[], Header], priority: int) -> None:
        try:
            header = step()
        except StopIteration as end:
            self.ended, (self.cache, self.length) = True, end.value
        else:
            self._disk.writer.do(partial(self._read, header), priority=priority)

    def _read(self, header: Header) -> None:
        """Disk thread."""
        found = attempt(lambda: self._disk.writer.read(header))
        if isinstance(found, Fault):
            self._then(partial(self._fill.throw, found.error))
        else:
            self._then(partial(self._fill.send, found))

    def _then(self, step: Callable[[], Header], priority: int = 0) -> None:
        try:
            self._disk.call(partial(self._advance, step, priority))
        except EngineDied:
            self.abandon()


def usable(ids: Ids, length: int, match: Match, grid: int) -> int:
    """Largest multiple of `grid` at which a row may resume. 0: memory has as many tokens."""
    at = outside_spans(ids, length, grid)
    return at if at > match.length // grid * grid else 0


class DiskTier:
    """Engine thread only, except for the thread that it starts."""

    def __init__(
        self, folder: Path, limit: int, call: Call, *, versions: str | None = None
    ) -> None:
        """`call` runs a function on the engine thread. Raises `BadRequest` for a bad folder."""
        self.folder = folder / files.FOLDER
        self.limit = limit
        self.versions = files.current_versions() if versions is None else versions
        self.call = call
        files.secure_folder(self.folder)
        self.index = Index()
        for header in files.read_headers(self.folder, self.versions):
            self.index.add(header)
        self._sent = 0
        """Bytes handed to the thread."""
        self.writer = DiskThread(self.folder, self.versions)
        self._shrink()

    def due(self, start: int, stop: int) -> bool:
        """Whether a file ends within tokens `[start, stop)` of a prompt."""
        return stop // EDGE > start // EDGE

    def save(
        self,
        key: CacheKey,
        ids: Ids,
        kv: Segment,
        states: Mapping[int, Snapshot],
        *,
        reply_at: int | None = None,
    ) -> None:
        """Queue what is not on disk yet of a row with tokens `ids`. `states`: snapshots by token
        count. `reply_at`: tokens before the reply. `None`: more of the prompt will follow, so its
        last tokens can wait."""
        steps, _ = self.index.walk(key, ids)
        covered = steps[-1][2] if steps else 0
        path = [header for header, _, _ in steps]
        left = self.limit - sum(header.nbytes for header in path)
        stop = len(ids) if reply_at is not None else len(ids) // EDGE * EDGE
        digest = digests(key, ids)
        for start, end in pairwise(_cuts(covered, stop, reply_at)):
            segment, tokens = kv.slice(start, end), ids[start:end]
            counts = [(i, len(arrays)) for i, *arrays in kv.layout]
            header = Header(digest(start), start, tokens, kv.complete, counts)
            arrays = [array for arrays in segment.arrays.values() for array in arrays]
            if not self._write(header, arrays, left):
                break
            path.append(header)
            left -= self.index.files[header.name].nbytes
        if states:
            digest = digests(key, ids)
            for at, state in sorted(states.items()):
                layers = list(state.layers.items())
                header = Header(digest(at), at, ids[:0], False, layers, state=True)
                if header.name not in self.index.files:
                    self._write(header, state.arrays, self.limit)
            _, every = self.index.walk(key, ids, len(ids))
            for header in every[RECENT + FORKS : -1]:  # the first and the last ones stay
                self._forget(header.name)
        self._touch(path)
        self._shrink()

    def _write(self, header: Header, arrays: Sequence[Any], left: int) -> bool:
        """Queue a file, if it has at most `left` bytes and the disk is fast enough."""
        tokens, layers = len(header.tokens), len(header.layers)
        nbytes = sum(array.nbytes for array in arrays)
        header = replace(header, nbytes=nbytes + 12 * tokens + 2**11 + 2**8 * layers)
        queued = self._sent - self.writer.done
        slow = queued > 0 and queued + header.nbytes > MAX_QUEUED
        if slow or header.nbytes > left:
            return False
        self._sent += nbytes
        self.index.add(header)

        def forget() -> None:
            """Disk thread."""
            with suppress(EngineDied):
                self.call(partial(self.index.remove, header.name))

        self.writer.do(partial(self.writer.write, header, host_arrays(arrays), forget))
        return True

    def find(self, key: CacheKey, ids: Ids, match: Match, grid: int) -> tuple[int, list[Step]]:
        """The longest prefix of `ids` from which a row can resume, and the files with what `match`,
        in memory, lacks of it. 0: it lacks nothing. At least one token is left to prefill."""
        steps, states = self.index.walk(key, ids[:-1], match.shared)
        needed = list[Step]()
        is_complete = all(node.complete for node in match.nodes)
        if is_complete and all(header.complete for header, _, _ in steps):
            covered = max(match.shared, steps[-1][2] if steps else 0)
            length = usable(ids, covered, match, grid)
        else:
            fits = (x for x in states if usable(ids, x.start, match, grid) == x.start)
            needed = [(state, state.start, state.start) for state in fits][:1]
            length = needed[0][2] if needed else 0
        return length, needed + [s for s in steps if s[1] < length and s[2] > match.shared]

    def fill(
        self,
        key: CacheKey,
        ids: Ids,
        matches: Callable[[], Match],
        make_cache: Callable[[], list[Any]],
        capacity: int,
        grid: int = 1,
    ) -> Filling:
        """Fill a row from memory and then file by file. `matches`: what memory has. `capacity`: of
        the row, in tokens. It resumes at a multiple of `grid`."""
        match = matches()
        goal, steps = self.find(key, ids, match, grid)
        if not goal:
            return None, 0
        self._touch([header for header, _, _ in self.index.walk(key, ids[:goal])[0]])
        first = steps[0][0]
        states = [i for i, _ in first.layers] if first.state else ()
        reached = min(match.shared, goal)
        filler, snapshot = RowFiller(make_cache(), goal, capacity - goal, states), None
        filler.put_nodes(match.nodes, reached)
        for header, start, stop in steps:
            try:
                arrays = device_arrays((yield header))
            except (BadFile, OSError) as reason:
                self._report_damage(header.name, reason)
                goal = 0 if states else usable(ids, reached, match, grid)
                break
            if header.state:
                snapshot = Snapshot(dict(header.layers), arrays)
                continue
            begin, reached = max(start, reached), min(stop, goal)
            by_layer = {i: [arrays.pop(0) for _ in range(count)] for i, count in header.layers}
            filler.put(by_layer, begin, reached, begin - start)
            del by_layer
        return (filler.finish(goal, snapshot), goal) if goal else (None, 0)

    def _report_damage(self, name: str, reason: BadFile | OSError) -> None:
        if isinstance(reason, FileNotFoundError):  # another process removed it
            self.index.remove(name)
            return
        log.warning("prefix cache: %s is ignored and removed: %s", self.folder / name, reason)
        self._forget(name)

    def clear(self) -> None:
        self.index = Index()
        self.writer.do(self.writer.clear)

    def report(self) -> dict[str, Any]:
        """Files and bytes known to this process."""
        return {"files": len(self.index.files), "bytes": self.index.nbytes, "limit": self.limit}

    def _touch(self, path: Sequence[Header]) -> None:
        """The path's first file becomes the newest, so that the tail is removed first."""
        held = self.index.files
        names = [header.name for header in reversed(path) if header.name in held]
        held |= {name: held.pop(name) for name in names}
        self.writer.do(partial(self.writer.touch, names))

    def _forget(self, name: str) -> None:
        self.index.remove(name)
        self.writer.do(partial(self.writer.remove, name))

    def _shrink(self) -> None:
        """Files that other processes wrote since the start do not count."""
        while self.index.nbytes > self.limit:
            self._forget(next(iter(self.index.files)))


def _cuts(start: int, stop: int, reply_at: int | None) -> list[int]:
    edges = {*range(start // EDGE * EDGE + EDGE, stop, EDGE), reply_at or 0}
    return sorted({at for at in edges if start < at < stop} | {start, stop}) if start < stop else []
