"""The disk tier: stores prefixes for later processes, and more than fits into memory.

The engine thread decides what is written and read, and makes all MLX arrays. A `DiskThread` reads
and writes. The limit is for the files that this process found at its start, or wrote."""

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
from .files import Arrays, BadFile, DiskThread, Header, device_arrays, host_arrays
from .segments import RowFiller, Segment, Snapshot
from .snapshots import FORKS, RECENT
from .tree import CacheKey, Ids, Match, common, outside_spans

log = logging.getLogger(__name__)

EDGE = 512
"""Most tokens of a file: limits its memory, and what is copied into a row between two steps."""
MAX_QUEUED = 2**29
"""Most bytes that wait to be written. The rest of a prompt is written with a later pass."""
States = Mapping[int, Snapshot]
"""Snapshots by token count."""
Piece = tuple[Header, int, int]
"""A file, and the tokens `[start, stop)` of a prompt that it has. For a snapshot, both are its
token count. `Header.start` is not relied on, as it may be damaged."""
Filling = Generator[Header, Arrays, tuple[list[Any] | None, int]]
"""Yields the files that it needs, and gets their arrays. Returns a row cache and its length in
tokens; `None` and 0: nothing was restored."""
Call = Callable[[Callable[[], Any]], Future[Any]]
"""Runs a function on the engine thread, between steps. Raises `EngineDied`."""


def digests(key: CacheKey, ids: Ids) -> Callable[[int], str]:
    """A function that returns the hex digest of key and tokens `[0, at)`, for ascending `at`."""
    state, done = hashlib.blake2b(key.digest(), digest_size=16), 0

    def digest(at: int) -> str:
        nonlocal done
        state.update(ids[done:at].tobytes())
        done = at
        return state.hexdigest()

    return digest


class Index:
    """The headers of the files on disk. Finds those of a prompt."""

    def __init__(self) -> None:
        self.files: dict[str, Header] = {}  # by name, the least recently used file first
        self.nbytes = 0
        self._segments: dict[tuple[str, int], set[str]] = {}
        """Names of files, by the digest of the tokens before them and their first token."""
        self._states: Counter[int] = Counter()  # the number of snapshots, by token count

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

    def walk(self, key: CacheKey, ids: Ids, shared: int = 0) -> tuple[list[Piece], list[Header]]:
        """The segments of a path, in order, and the snapshots after tokens of these segments or of
        the first `shared` tokens, the longest first."""
        digest, end, steps = digests(key, ids), 0, list[Piece]()
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
    """Fills a row with all that is stored of a prompt, of which the disk has more than memory. It
    starts at once. Other requests run between two files. Engine thread only."""

    def __init__(self, disk: DiskTier, fill: Filling) -> None:
        self.ended = False  # any thread may read this
        self.cache: list[Any] | None = None  # set at the end, unless nothing was restored
        self.length = 0  # tokens in the row cache
        self._disk = disk
        self._fill = fill
        self._then(partial(next, fill), priority=1)  # behind the files that wait to be written

    def abandon(self) -> None:
        """End the restore, as its request ended or it failed, and free its memory at once."""
        self.ended = True
        self._fill.close()

    def _advance(self, step: Callable[[], Header], priority: int) -> None:
        if not self.ended and (fault := attempt(partial(self._take, step, priority))):
            fault.log("prefix cache: reading a prefix from disk")
            self.abandon()

    def _take(self, step: Callable[[], Header], priority: int) -> None:
        """Run a step of the filling, and queue the reading of the file that it needs next."""
        try:
            header = step()
        except StopIteration as end:
            self.ended, (self.cache, self.length) = True, end.value
        else:
            self._disk.writer.do(partial(self._read, header), priority=priority)

    def _read(self, header: Header) -> None:  # disk thread
        found = attempt(lambda: self._disk.writer.read(header))
        if isinstance(found, Fault):
            self._then(partial(self._fill.throw, found.error))
        else:
            self._then(partial(self._fill.send, found))

    def _then(self, step: Callable[[], Header], priority: int = 0) -> None:
        """Run a step of the filling on the engine thread. Any thread may call this."""
        try:
            self._disk.call(partial(self._advance, step, priority))
        except EngineDied:
            self.abandon()


def usable(ids: Ids, length: int, match: Match, grid: int) -> int:
    """Largest multiple of `grid` up to `length` where a row may resume. 0: `match` goes as far."""
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
        self._sent = 0  # bytes of all arrays that were queued to be written
        self.writer = DiskThread(self.folder, self.versions)
        self._shrink()

    def due(self, start: int, stop: int) -> bool:
        """Whether a file ends after token `start` of a prompt, and at `stop` or before."""
        return stop // EDGE > start // EDGE

    def save(
        self, key: CacheKey, ids: Ids, kv: Segment, states: States, *, reply_at: int | None = None
    ) -> None:
        """Queue what is not on disk yet of a row with tokens `ids` and segment `kv`, as far as the
        limit and the speed of the disk permit. `reply_at`: tokens before the reply. `None`: more of
        the prompt will follow, so its last tokens can wait."""
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
            for header in every[RECENT + FORKS : -1]:  # the longest and the shortest stay
                self._forget(header.name)
        self._touch(path)
        self._shrink()

    def _write(self, header: Header, arrays: Sequence[Any], left: int) -> bool:
        """Queue a file. `False`: it has more than `left` bytes, or the disk is too slow."""
        nbytes = sum(array.nbytes for array in arrays)
        metadata = 12 * len(header.tokens) + 2**11 + 2**8 * len(header.layers)  # an estimate
        header = replace(header, nbytes=nbytes + metadata)
        queued = self._sent - self.writer.done
        is_slow = queued > 0 and queued + header.nbytes > MAX_QUEUED
        if is_slow or header.nbytes > left:
            return False
        self._sent += nbytes
        self.index.add(header)

        def forget() -> None:  # disk thread
            with suppress(EngineDied):
                self.call(partial(self.index.remove, header.name))

        self.writer.do(partial(self.writer.write, header, host_arrays(arrays), forget))
        return True

    def find(self, key: CacheKey, ids: Ids, match: Match, grid: int) -> tuple[int, list[Piece]]:
        """How many tokens of `ids` a row can resume with, and the files with what `match`, which is
        in memory, lacks of them. 0: `match` goes as far. At least one token is left to prefill."""
        steps, states = self.index.walk(key, ids[:-1], match.shared)
        needed = list[Piece]()
        is_complete = all(node.complete for node in match.nodes)
        if is_complete and all(header.complete for header, _, _ in steps):
            covered = max(match.shared, steps[-1][2] if steps else 0)
            length = usable(ids, covered, match, grid)
        else:
            fits = (x for x in states if usable(ids, x.start, match, grid) == x.start)
            needed = [(state, state.start, state.start) for state in fits][:1]
            length = needed[0][2] if needed else 0
        missing = [step for step in steps if step[1] < length and step[2] > match.shared]
        return length, needed + missing

    def fill(
        self, key: CacheKey, ids: Ids, matches: Callable[[], Match],
        make_cache: Callable[[], list[Any]], capacity: int, grid: int = 1,
    ) -> Filling:  # fmt: skip
        """Fill a row from memory and then file by file. `matches`: returns what memory has.
        `capacity`: of the row, in tokens. It resumes at a multiple of `grid`."""
        match = matches()
        goal, steps = self.find(key, ids, match, grid)
        if not goal:
            return None, 0
        self._touch([header for header, _, _ in self.index.walk(key, ids[:goal])[0]])
        first = steps[0][0]  # a snapshot, if one is needed
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
            del by_layer  # before the next file is read
        return (filler.finish(goal, snapshot), goal) if goal else (None, 0)

    def _report_damage(self, name: str, reason: BadFile | OSError) -> None:
        if isinstance(reason, FileNotFoundError):  # another process removed it
            self.index.remove(name)
            return
        log.warning("prefix cache: %s is ignored and removed: %s", self.folder / name, reason)
        self._forget(name)

    def clear(self) -> None:
        """Remove all files, also those of other processes."""
        self.index = Index()
        self.writer.do(self.writer.clear)

    def report(self) -> dict[str, Any]:
        """Files and bytes known to this process."""
        return {"files": len(self.index.files), "bytes": self.index.nbytes, "limit": self.limit}

    def _touch(self, path: Sequence[Header]) -> None:
        """The path's first file becomes the newest, so that the tail is removed first."""
        headers = self.index.files
        names = [header.name for header in reversed(path) if header.name in headers]
        headers |= {name: headers.pop(name) for name in names}
        self.writer.do(partial(self.writer.touch, names))

    def _forget(self, name: str) -> None:
        self.index.remove(name)
        self.writer.do(partial(self.writer.remove, name))

    def _shrink(self) -> None:
        """Remove the least recently used files until the others are within the limit."""
        while self.index.nbytes > self.limit:
            self._forget(next(iter(self.index.files)))


def _cuts(start: int, stop: int, reply_at: int | None) -> list[int]:
    """Where files of tokens `[start, stop)` begin and end. Empty if there are no tokens."""
    if start >= stop:
        return []
    edges = {*range(start // EDGE * EDGE + EDGE, stop, EDGE), reply_at or 0}
    return sorted({at for at in edges if start < at < stop} | {start, stop})
