"""The persistent gateway of `mlx-provider up`: its files, its start and its end."""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from ..client.runtime_folder import EngineLock, has_ended, holder, is_held
from ..config import state_folder
from ..errors import EngineUnavailable
from ..safe_open import make_folder, obstacle, open_own, read_own, replace_own
from . import foreground
from .config import ANYTHING, Served, served_config, write_config
from .proxy import STOP_LIMIT, await_answer, make_key, require_proxy, start_proxy

if TYPE_CHECKING:
    from .engine import Tell

PORT = 4100
LARGEST = 2**16  # bytes of a file that is read
FIRST_LIMIT = 120.0  # seconds for the first token
SIGN_LIMIT = 5.0  # seconds from the lock to the process id in it
POLL = 0.1  # seconds
KEY = re.compile(r"sk-[!-~]{16,}")


@dataclass(frozen=True)
class Record:
    """What the gateway serves, as it is kept in a file."""

    served: Served
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


RECORD = TypeAdapter(Record)


@dataclass(frozen=True)
class Running:
    pid: int
    record: Record


class GatewayFiles:
    """Methods raise `EngineUnavailable` with a remedy if a file is not this user's alone."""

    def __init__(self) -> None:
        self.folder = state_folder() / "gateway"
        self.lock = self.folder / "lock"
        self.key_file = self.folder / "key"
        self._record = self.folder / "record.json"

    def prepare(self) -> None:
        """Make the folder, for this user alone."""
        with _report_unusable(self.folder):
            make_folder(self.folder)
            self.folder.parent.chmod(0o700)
            state = self.folder.lstat()
            if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
                raise EngineUnavailable(f"{self.folder} is not a folder of this user: remove it")
            self.folder.chmod(0o700)

    def key(self) -> tuple[str, bool]:
        """The proxy's master key, and whether it is new. One that others can read is replaced."""
        with _report_unusable(self.key_file):
            with suppress(FileNotFoundError), os.fdopen(open_own(self.key_file), "rb") as file:
                key = file.read(LARGEST).decode("ascii", "replace").strip()
                closed = not os.fstat(file.fileno()).st_mode & 0o077
                if closed and KEY.fullmatch(key):
                    return key, False
            key = make_key()
            replace_own(self.key_file, f"{key}\n".encode())
        return key, True

    def record(self) -> Record | None:
        """What the last gateway served. `None`: none, or its file cannot be parsed."""
        with _report_unusable(self._record), suppress(FileNotFoundError, ValidationError):
            return RECORD.validate_json(read_own(self._record, LARGEST))
        return None

    def write(self, record: Record | None) -> None:
        """Replace the record. `None` removes it."""
        with _report_unusable(self._record):
            if record is None:
                self._record.unlink(missing_ok=True)
            else:
                replace_own(self._record, RECORD.dump_json(record))

    def try_lock(self) -> EngineLock | None:
        """The lock, which the proxy inherits, without an earlier process id. `None`: it is held."""
        lock = EngineLock.try_take(self.lock)
        if lock is not None:
            os.ftruncate(lock.descriptor, 0)
            os.fchmod(lock.descriptor, 0o600)
        return lock

    def running(self) -> Running | None:
        """The gateway that holds the lock; `None`: none does. A process id alone proves nothing."""
        deadline = time.monotonic() + SIGN_LIMIT
        while is_held(self.lock):
            pid, record = holder(self.lock), self.record()
            if pid.isdecimal() and record is not None:
                return Running(int(pid), record)
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"a gateway holds {self.lock}, but its files do not identify it: "
                    f"end its process (`lsof {self.lock}` names it)"
                )
            time.sleep(POLL)
        return None


@contextmanager
def _report_unusable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = obstacle(path.parent)
        summary = f": {why}" if why else f" ({error.strerror}): remove it"
        raise EngineUnavailable(f"{path} cannot be used{summary}") from None


def start(files: GatewayFiles, record: Record, environ: Mapping[str, str], tell: Tell) -> bool:
    """Start proxy and engine, which continue after this process. Returns False if another process
    was first. On failure, ends the proxy and restores the record. Raises `NotInstalled`,
    `EngineUnavailable`, the errors of the load, and `SystemExit` after a signal."""
    from ..client.connection import local_client
    from .engine import loading

    require_proxy()
    with foreground.ending_by_signal(), ExitStack() as ending, ExitStack() as failing:
        lock = files.try_lock()
        if lock is None:
            return False
        ending.callback(lock.release)
        key, new = files.key()
        tell("key", f"{files.key_file}, {'new' if new else 'as before'}")
        engine = local_client(environ)
        ending.callback(engine.close)
        with loading(record.served, engine, tell):
            failing.callback(files.write, files.record())
            files.write(record)
            config = write_config(served_config(record.served, ANYTHING), files.folder)
            proxy = start_proxy(config, environ, port=record.port, key=key, lock=lock)
            failing.callback(proxy.stop)
        proxy.wait_ready()
        tell("proxy", proxy.url)
        # the engine then has a client, and does not end when idle
        proxy.generate_token(record.served.name, FIRST_LIMIT)
        failing.pop_all()
    return True


def await_ready(files: GatewayFiles, running: Running) -> None:
    if not await_answer(running.record.url, lambda: files.running() == running):
        raise EngineUnavailable(
            f"the gateway (process {running.pid}) does not answer: see {files.folder}/proxy.log; "
            "`mlx-provider down` ends it"
        )


def stop(files: GatewayFiles, running: Running, environ: Mapping[str, str], tell: Tell) -> None:
    """End the proxy, and the engine once no request runs. Raises `EngineUnavailable`."""
    from .engine import end_when

    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(running.pid, number)
        if has_ended(files.lock, running.pid, STOP_LIMIT):
            tell("proxy", f"process {running.pid} has ended")
            tell("engine", end_when(environ, "`mlx-provider down`", "idle"))
            return
    raise EngineUnavailable(f"the proxy (process {running.pid}) does not end")
