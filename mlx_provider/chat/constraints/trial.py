"""A client's grammar is tried in a process of its own before it is compiled here.

llguidance 1.9.1 bounds most of its work, but not all: a chain of references overflows the stack,
`multipleOf` and intersections may be computed without end (derivre 0.3.13, relevance.rs), and no
thread can be stopped. What the small process survives within its limits, the engine compiles.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ...errors import BadRequest, RequestFailed

MAX_GRAMMAR = 1_000_000
"""Characters of one grammar, schemas written out."""
SECONDS = 1.0
"""Processor time for one grammar; everyday schemas take some milliseconds."""
REQUEST_SECONDS = 4.0
"""Processor time for all grammars of a request; every tool is one."""
AT_ONCE = 2
"""Grammars that are tried at the same time."""
LIMITS: Mapping[str, int | bool] = MappingProxyType(
    {"max_lexer_states": 100_000, "verbose_errors": False}
)
"""Of `llguidance.LLParserLimits`, other than the defaults: each row keeps some 2 kB for each state,
and errors are told to clients."""
CHILD = Path(__file__).with_name("trial_process.py")

_ENDS: Mapping[int, str] = MappingProxyType(
    {
        signal.SIGPROF: f"it takes more than {SECONDS:g} s to compile, or too long for each token",
        signal.SIGSEGV: "it is nested too deep, or refers too far",
        signal.SIGBUS: "it is nested too deep, or refers too far",
        signal.SIGABRT: "it takes too much memory",
        signal.SIGKILL: "it takes too much memory",
    }
)


@dataclass
class Allowance:
    """Processor time that a request's grammars may still take."""

    seconds: float = REQUEST_SECONDS

    def spend(self, seconds: float) -> None:
        self.seconds -= seconds
        if self.seconds <= 0:
            raise BadRequest(
                f"the grammars of this request take more than {REQUEST_SECONDS:g} s to compile; "
                "send fewer or plainer tools or schemas"
            )


class GrammarTrial:
    """Tries grammars over one vocabulary; safe from any thread.

    size: tokens of the vocabulary. names: ids of its special tokens. The process starts with the
    first grammar and ends with this object.
    """

    def __init__(self, size: int, names: Mapping[str, int]) -> None:
        self._vocabulary = json.dumps({"size": size, "names": dict(names)}).encode() + b"\n"
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._places = threading.Semaphore(AT_ONCE)
        weakref.finalize(self, _end_all, self._idle)

    def wrong(self, lark: str, allowance: Allowance) -> str:
        """What is wrong with a grammar, or an empty text. Raises what `Allowance.spend` does."""
        if len(lark) > MAX_GRAMMAR:
            return f"it is longer than {MAX_GRAMMAR} characters"
        with self._places:
            process = self._taken()
            said = _asked(process, lark.encode())
            if said:
                with self._lock:
                    self._idle.append(process)
        if not said:
            reason = _death(process)
            allowance.spend(SECONDS)
            return reason
        found = json.loads(said)
        allowance.spend(found["seconds"])
        return str(found["wrong"])

    def _taken(self) -> subprocess.Popen[bytes]:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                _end(process)
        return self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", CHILD, json.dumps(dict(LIMITS))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise RequestFailed(
                f"the process that tries grammars does not start: {error}"
            ) from None
        _write(process, self._vocabulary)
        return process


def _asked(process: subprocess.Popen[bytes], lark: bytes) -> bytes:
    """The process's answer; empty: it has ended."""
    head = json.dumps({"size": len(lark), "seconds": SECONDS}).encode() + b"\n"
    _write(process, head + lark)
    assert process.stdout is not None  # noqa: S101  (a pipe)
    return process.stdout.readline()


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None  # noqa: S101  (a pipe)
    with suppress(OSError):  # where it has ended, reading tells
        process.stdin.write(data)
        process.stdin.flush()


def _death(process: subprocess.Popen[bytes]) -> str:
    """Why a process has ended, as what is wrong with the grammar. Raises `RequestFailed`."""
    _end(process)
    reason = _ENDS.get(-(process.returncode or 0))
    if reason is None:
        raise RequestFailed(f"the trial of a grammar ended with {process.returncode}")
    return reason


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was not yet written is for nobody
                pipe.close()
    process.wait()


def _end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        _end(process)
