"""The thread that reads and checks the disk tier's files, one restore after another.

The thread that makes all changes in the disk tier's folder.
"""

from __future__ import annotations

import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ...isolation import Fault, Isolation
from . import files
from .disk_index import used
from .files import BadFile, Header, HostArray
from .restore import Restore

log = logging.getLogger(__name__)

T = TypeVar("T")
LOOK = 1.0
"""Seconds between checks whether anyone still runs the thread's calls."""


class Call(Protocol):
    """Runs a function on the engine thread, between steps."""

    def __call__(self, function: Callable[[], T], /) -> Future[T]: ...


class Closed(Exception):
    """The engine thread no longer runs calls."""


class Reader:
    """Reads into memory that the engine thread allocated and then takes slice by slice, so that
    steps of other requests run in between."""

    def __init__(
        self, folder: Path, versions: str, call: Call, written: Callable[[], None]
    ) -> None:
        """`written` waits for files that are being written."""
        self._folder = folder
        self._versions = versions
        self._call = call
        self._written = written
        self._closed = False
        self._jobs: queue.SimpleQueue[Restore | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="prefix-disk-reader", daemon=True).start()

    def read(self, restore: Restore) -> None:
        self._jobs.put(restore)

    def close(self) -> None:
        self._closed = True
        self._jobs.put(None)

    def _run(self) -> None:
        while (restore := self._jobs.get()) is not None and not self._closed:
            with Isolation(self._failed):
                self._restore(restore)
            with Isolation():
                self._on_engine_thread(restore.abandon)  # no effect once it has ended

    def _restore(self, restore: Restore) -> None:
        needed = self._on_engine_thread(restore.begin)
        self._written()
        for header in needed:
            try:
                self._fill(header, restore)
            except (BadFile, OSError) as reason:
                self._on_engine_thread(partial(restore.stop, header.name, reason))
                return
            while self._on_engine_thread(restore.take):
                pass
            if restore.ended:
                return
        self._on_engine_thread(restore.finish)

    def _fill(self, header: Header, restore: Restore) -> None:
        contents = files.open_file(self._folder / header.name, self._versions)
        with contents.file:
            if contents.header.name != header.name:
                raise BadFile("its name does not fit its content")
            contents.read_into(self._on_engine_thread(partial(restore.stage, contents)))

    def _on_engine_thread(self, function: Callable[[], T]) -> T:
        future = self._call(function)
        while not future.done():
            wait([future], LOOK)
            if self._closed and not future.done():
                raise Closed
        return future.result()

    def _failed(self, fault: Fault) -> None:
        if not self._closed:
            log.error("prefix cache: a prefix could not be read from disk\n%s", fault.trace)


WRITER_LOOK = 2.0
"""Seconds between checks for files of other engines."""


class Writer:
    """Its methods queue a job and return at once. `news` gets (name of a removed file, bytes
    written), and `found` the files of other processes."""

    def __init__(
        self,
        folder: Path,
        limit: int,
        versions: str,
        news: queue.SimpleQueue[tuple[str, int]],
        found: queue.SimpleQueue[Header],
        known: Iterable[str] = (),
    ) -> None:
        """`known`: names of files that need no report."""
        self._path = folder
        self._identity = _identity(folder)
        self._limit = limit
        self._versions = versions
        self._news = news
        self._found = found
        self._known = set(known)
        self._seen = 0
        self._failure = ""
        self._jobs: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._jobs.put((self._shrink,))  # the limit may be lower than that of the last process
        self._thread = threading.Thread(target=self._run, name="prefix-disk", daemon=True)
        self._thread.start()

    def write(
        self, header: Header, arrays: Sequence[HostArray], size: int, path: Sequence[str]
    ) -> None:
        """`path`: the files before it, which are worth more."""
        self._jobs.put((self._do_write, header, arrays, size, tuple(path)))

    def remove(self, name: str) -> None:
        self._jobs.put((self._do_remove, name))

    def touch(self, names: Sequence[str]) -> None:
        """The path's first file becomes the newest, so that the tail is removed first."""
        if names:
            self._jobs.put((self._do_touch, tuple(names)))

    def clear(self) -> None:
        self._jobs.put((self._do_clear,))

    def flush(self) -> None:
        done = threading.Event()
        self._jobs.put((done.set,))
        while not done.wait(WRITER_LOOK) and self._thread.is_alive():
            pass

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job[0](*job[1:])
            except (OSError, BadFile) as reason:
                if str(reason) != self._failure:
                    log.warning("prefix cache: disk tier: %s", reason)
                self._failure = str(reason)

    @property
    def _folder(self) -> Path:
        """Raises `BadFile` if another one, or a link, is in its place."""
        if _identity(self._path) != self._identity:
            raise BadFile(f"{self._path} was replaced: nothing is written any more")
        return self._path

    def _next(self) -> tuple[Any, ...] | None:
        try:
            return self._jobs.get(timeout=WRITER_LOOK)
        except queue.Empty:
            return (self._do_look,)

    def _do_look(self) -> None:
        changed = self._folder.stat().st_mtime_ns
        if changed == self._seen:
            return
        self._seen = changed
        there = {path.name for path, _ in self._files()}
        for name in sorted(there - self._known):
            try:
                header = files.read_header(self._folder / name, self._versions)
            except (BadFile, FileNotFoundError):
                continue
            if header.name == name:
                self._found.put(header)
        self._known = there

    def _do_write(
        self, header: Header, arrays: Sequence[HostArray], size: int, path: Sequence[str]
    ) -> None:
        written = False
        try:
            if not (self._folder / header.name).exists():
                files.write(self._folder, header, arrays, self._versions)
            self._known.add(header.name)
            written = True
        finally:
            self._news.put(("" if written else header.name, size))
        self._do_touch([*path, header.name])
        self._shrink()

    def _do_remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def _do_touch(self, names: Sequence[str]) -> None:
        now = time.time_ns()
        for later, name in enumerate(reversed(names)):
            path = self._folder / name
            if path.exists():
                os.utime(path, ns=(now + later, now + later))

    def _do_clear(self) -> None:
        for path, _ in self._files():
            path.unlink(missing_ok=True)

    def _shrink(self) -> None:
        found = [(of.st_mtime_ns, used(of), path) for path, of in self._files()]
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit:
                return
            path.unlink(missing_ok=True)
            self._news.put((path.name, 0))
            total -= size

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._folder.glob(f"*{files.SUFFIX}"):
            try:
                found = path.lstat()
            except FileNotFoundError:  # another process removed it
                continue
            if stat.S_ISREG(found.st_mode):
                yield path, found


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.lstat()
    return found.st_dev, found.st_ino
