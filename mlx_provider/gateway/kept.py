"""Files of the persistent gateway: key, record and lock, in a folder of this user only."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ..client.runtime_folder import EngineLock, holder, is_held
from ..config import state_folder
from ..errors import EngineUnavailable
from ..safe_open import make_folder, obstacle, open_own, read_own, replace_own
from .config import Served
from .proxy import master_key

PORT = 4100
"""LiteLLM's own default is 4000."""
LARGEST = 2**16
SIGN_LIMIT = 5.0
"""Seconds from the lock to the process id in it."""
POLL = 0.1
KEY = re.compile(r"sk-[!-~]{16,}")


@dataclass(frozen=True)
class Record:
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


class Kept:
    """Folder of the persistent gateway. Methods raise `EngineUnavailable` with a remedy if a folder
    or file is not exclusive to this user."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.folder = state_folder(environ) / "gateway"
        self.lock = self.folder / "lock"
        self.key_file = self.folder / "key"
        self._record = self.folder / "record.json"

    def prepare(self) -> None:
        try:
            make_folder(self.folder)
            self.folder.parent.chmod(0o700)
            state = self.folder.lstat()
            if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
                raise EngineUnavailable(f"{self.folder} is not a folder of this user: remove it")
            self.folder.chmod(0o700)
        except OSError as error:
            raise _unusable(self.folder, error) from None

    def key(self, *, renew: bool = False) -> tuple[str, bool]:
        """The proxy's master key, and whether it is new. A key that other users could read is
        replaced."""
        try:
            kept = None if renew else self._read_key()
            if kept is not None:
                return kept, False
            key = master_key()
            replace_own(self.key_file, f"{key}\n".encode())
        except OSError as error:
            raise _unusable(self.key_file, error) from None
        return key, True

    def _read_key(self) -> str | None:
        try:
            descriptor = open_own(self.key_file)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            closed = not os.fstat(descriptor).st_mode & 0o077
            text = file.read(LARGEST).decode("ascii", "replace").strip()
        return text if closed and KEY.fullmatch(text) else None

    def record(self) -> Record | None:
        try:
            return RECORD.validate_json(read_own(self._record, LARGEST))
        except (FileNotFoundError, ValidationError):
            return None
        except OSError as error:
            raise _unusable(self._record, error) from None

    def write(self, record: Record | None) -> None:
        """`None` deletes it."""
        try:
            if record is None:
                self._record.unlink(missing_ok=True)
            else:
                replace_own(self._record, RECORD.dump_json(record))
        except OSError as error:
            raise _unusable(self._record, error) from None

    def try_lock(self) -> EngineLock | None:
        """For the proxy to inherit. `None`: a gateway runs or starts. The process id of an earlier
        gateway is removed from the file."""
        lock = EngineLock.try_take(self.lock)
        if lock is not None:
            os.ftruncate(lock.descriptor, 0)
            os.fchmod(lock.descriptor, 0o600)
        return lock

    def running(self) -> Running | None:
        """The holder of the lock, so that no other process is mistaken for the gateway."""
        deadline = time.monotonic() + SIGN_LIMIT
        while is_held(self.lock):
            pid, record = holder(self.lock), self.record()
            if pid.isdigit() and record is not None:
                return Running(int(pid), record)
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"a gateway holds {self.lock}, but its files do not identify it: "
                    f"end its process (`lsof {self.lock}` names it)"
                )
            time.sleep(POLL)
        return None


def _unusable(path: Path, error: OSError) -> EngineUnavailable:
    why = obstacle(path.parent)
    told = f": {why}" if why else f" ({error.strerror}): remove it"
    return EngineUnavailable(f"{path} cannot be used{told}")
