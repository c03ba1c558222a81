"""The thread that reads and checks the disk tier's files, one restore after another."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from ...isolation import Fault, Isolation
from . import files
from .files import BadFile, Header
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
