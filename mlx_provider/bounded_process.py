"""Child processes with limits, for work that a third party's grammar or chat template can make
endless: a thread cannot be stopped. A child runs this file, and this file runs a program: a file
with the function `make_answerer(*arguments)`, which returns a function from a message to its answer
(`None` if the message is a setup). This file limits memory. The program limits its own processor
time (`setitimer`), and may define `stack_bytes()` for its thread. Neither imports this package."""

import json
import resource
import runpy
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

INTERVAL = 0.1  # seconds between two looks at the memory of a child
JOIN_LIMIT = 1.0  # seconds until a thread that should end is left alone
ENFORCED = sys.platform == "linux"  # the system enforces `RLIMIT_AS`
MOST_IDLE = 2
"""Further idle processes end."""
MAX_SETUPS = 64
"""A process that would have more is replaced, so that its memory stays small."""
ENDS: Mapping[int, str] = {
    signal.SIGPROF: "it takes too much processor time",
    signal.SIGXCPU: "it takes too much processor time",
    signal.SIGSEGV: "it is nested too deep",
    signal.SIGBUS: "it is nested too deep",
    signal.SIGABRT: "it takes too much memory",
    signal.SIGKILL: "it takes too much memory",
}
"""Signals that end a process at one of its limits."""


@contextmanager
def in_thread(run: Callable[[threading.Event], None]) -> Iterator[None]:
    """Call `run` in a thread beside the `with` block. Its event is set when the block ends."""
    over = threading.Event()
    thread = threading.Thread(target=run, args=(over,), name="beside-a-block", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(JOIN_LIMIT)


def memory_limit(process: subprocess.Popen[bytes], limit: int) -> AbstractContextManager[None]:
    """For a `with` block: kill `process` if it has more than `limit` bytes of resident memory. Does
    nothing where the system enforces `RLIMIT_AS` itself (not on macOS)."""
    command = ["ps", "-o", "rss=", "-p", str(process.pid)]

    def watch(over: threading.Event) -> None:
        while not over.wait(INTERVAL):
            kibibytes = subprocess.run(command, capture_output=True, check=False).stdout.strip()
            if int(kibibytes or 0) * 1024 > limit:
                process.kill()
                return

    return nullcontext() if ENFORCED else in_thread(watch)


class ProcessEnded(Exception):
    """A process ended before it answered. `code`: as `Popen.returncode`. `reason`: for people, the
    limit that ended it; empty if no limit was the cause."""

    def __init__(self, code: int) -> None:
        super().__init__(f"ended with {code}")
        self.code = code
        self.reason = ENDS.get(-code, "")


@dataclass(eq=False)
class _Running:
    process: subprocess.Popen[bytes]
    setups: set[str] = field(default_factory=set)


class BoundedProcesses:
    """Up to `at_once` processes of one program with `memory` bytes each. Safe from any thread.
    Messages and answers are JSON behind a line with their length. All end with this object."""

    def __init__(
        self, program: Path, memory: int, arguments: Sequence[str] = (), *, at_once: int = 8
    ) -> None:
        self._memory = memory
        self._command = [sys.executable, "-P", __file__, str(program), str(memory), *arguments]
        self.idle: list[_Running] = []
        self._lock = threading.Lock()
        self._places = threading.Semaphore(at_once)
        weakref.finalize(self, _end_all, self.idle)

    def ask(self, message: bytes, setups: Mapping[str, bytes]) -> bytes:
        """Return the answer; waits while all processes are busy. `setups`: by name, messages that
        the process must have read before; it gets each once. Raises `ProcessEnded` if the process
        ends before it answers, `OSError` if none starts."""
        with self._places:
            running = self._idle_or_new(setups)
            with memory_limit(running.process, self._memory):
                for name in setups.keys() - running.setups:
                    _write(running.process, setups[name])
                    running.setups.add(name)
                _write(running.process, message)
                answer = _read(running.process)
            with self._lock:
                if answer is not None and len(self.idle) < MOST_IDLE:
                    self.idle.append(running)
                    return answer
            code = _end(running.process)
        if answer is None:
            raise ProcessEnded(code)
        return answer

    def _idle_or_new(self, setups: Mapping[str, bytes]) -> _Running:
        with self._lock:
            while self.idle:
                running = self.idle.pop()
                full = len(running.setups | setups.keys()) > MAX_SETUPS
                if running.process.poll() is None and not full:
                    return running
                _end(running.process)
        process = subprocess.Popen(
            self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
        )
        return _Running(process)


def _write(process: subprocess.Popen[bytes], message: bytes) -> None:
    assert process.stdin is not None  # noqa: S101  (a pipe)
    with suppress(OSError):  # the read reports it
        process.stdin.write(b"%d\n" % len(message))
        process.stdin.write(message)
        process.stdin.flush()


def _read(process: subprocess.Popen[bytes]) -> bytes | None:
    """`None`: the process has ended, perhaps inside an answer."""
    assert process.stdout is not None  # noqa: S101  (a pipe)
    size = process.stdout.readline()
    if not size.endswith(b"\n"):
        return None
    answer = process.stdout.read(int(size))
    return answer if len(answer) == int(size) else None


def _end(process: subprocess.Popen[bytes]) -> int:
    """Close the pipes, which ends the program. Returns its exit code."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # unwritten data is not needed
                pipe.close()
    return process.wait()


def _end_all(idle: list[_Running]) -> None:
    for running in idle:
        running.process.kill()
        _end(running.process)


def _serve(program: str, memory: str, *arguments: str) -> None:
    defined = runpy.run_path(program)
    with suppress(ValueError, OSError):  # macOS defines the limit, but does not accept it
        resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer = defined["make_answerer"](*arguments)
    if "stack_bytes" in defined:
        threading.stack_size(defined["stack_bytes"]())
    threading.Thread(target=_answer_all, args=(answer,)).start()


def _answer_all(answer: Callable[[Any], Any]) -> None:
    while size := sys.stdin.buffer.readline():
        answered = answer(json.loads(sys.stdin.buffer.read(int(size))))
        if answered is not None:
            written = json.dumps(answered).encode()
            sys.stdout.buffer.write(b"%d\n" % len(written) + written)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
