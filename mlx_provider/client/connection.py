"""Finds or starts engines: one client per address and key in a process. An engine is this user's
process on this machine, which the first client starts, or one at an address."""

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO

from pydantic import ValidationError

from ..config import PREFIX, Runtime, runtime
from ..errors import EngineUnavailable
from ..protocol.events import ErrorBody
from .http import HttpClient
from .messages import Address, parse_address
from .runtime_folder import READY, EngineLock, check_folder, holder, identity, open_log, tail

START_LIMIT, POLL = 180.0, 0.05  # seconds
ENGINE_COMMAND = (sys.executable, "-P", "-m", "mlx_provider.server.run")


@dataclass(frozen=True)
class LocalEngine:
    """Starts this user's engine process. Safe from any thread and any process."""

    runtime: Runtime
    command: Sequence[str] = ENGINE_COMMAND
    start_limit: float = START_LIMIT

    def ensure(self) -> None:
        """Wait until an engine listens; start it if necessary. Raises `EngineUnavailable`, or the
        error with which the engine ended at its start."""
        check_folder(self.runtime, make=True)
        deadline = time.monotonic() + self.start_limit
        try:
            while (lock := EngineLock.try_take(self.runtime.lock)) is None:
                if self.runtime.listens():
                    return
                if time.monotonic() > deadline:
                    raise EngineUnavailable(
                        f"engine process {holder(self.runtime.lock)} does not answer: "
                        f"end it, or see {self.runtime.log}"
                    )
                time.sleep(POLL)
            try:
                os.ftruncate(lock.descriptor, 0)  # removes the process id of an earlier engine
                self._start(lock)
            finally:
                lock.release()
        except OSError as error:
            raise EngineUnavailable(
                f"no engine process can be reached or started in {self.runtime.folder}: {error}"
            ) from None

    def _start(self, lock: EngineLock) -> None:
        folder = {PREFIX + "RUNTIME_DIR": str(self.runtime.folder)}
        with os.fdopen(open_log(self.runtime.log), "ab") as log, ExitStack() as ending:
            begin = log.seek(0, os.SEEK_END)  # where the output of this start begins
            reader, writer = os.pipe()
            report = ending.enter_context(os.fdopen(reader, "rb"))
            try:
                process = subprocess.Popen(
                    [*self.command, "--lock-fd", str(lock.descriptor), "--ready-fd", str(writer)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(lock.descriptor, writer),
                    start_new_session=True,
                    env={**self.runtime.environment, **folder},
                )
            finally:
                os.close(writer)
            # waits for the child, so that it never becomes a zombie
            threading.Thread(target=process.wait, daemon=True, name="engine reaper").start()
            self._read_report(process, report, begin)

    def _read_report(self, process: subprocess.Popen[bytes], report: IO[bytes], begin: int) -> None:
        log = self.runtime.log
        if not select.select([report], [], [], self.start_limit)[0]:
            process.kill()
            raise EngineUnavailable(
                f"engine process {process.pid} did not start within {self.start_limit:g} s and was "
                f"ended; see {log}"
            )
        if (line := report.readline()) == READY:
            return
        with suppress(ValidationError):  # cut or empty: it ended while it wrote, or before
            raise ErrorBody.model_validate_json(line).exception()
        code = process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        last = f"{tail(log, begin)}; full log: {log}"
        raise EngineUnavailable(f"the engine process ended at its start ({how}): {last}")


def connect(api_base: str | None = None, api_key: str | None = None) -> HttpClient:
    """Connects and starts nothing before its first request. `api_base`: `http(s)://host:port` or
    `unix:/path/to.sock`; unset: this user's engine on this machine. Raises `BadRequest`."""
    return _connections.client(api_base, api_key)


def local_client(environ: Mapping[str, str] = os.environ) -> HttpClient:
    """A new client of this user's engine."""
    engine = LocalEngine(runtime(environ))
    address = Address("http://engine", os.fspath(engine.runtime.socket))
    return HttpClient(address, start=engine.ensure, identity=partial(identity, environ))


class Connections:
    """One client per address and key. The socket in the runtime folder is the address of this
    user's engine. Safe from any thread and across `fork`: there is no lock to inherit locked."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._clients: dict[tuple[str, str | None], HttpClient] = {}

    def client(self, api_base: str | None, api_key: str | None) -> HttpClient:
        # over the unix socket, access depends on the owner alone
        key = (api_base, api_key) if api_base else (str(runtime(self._environ).socket), None)
        if (found := self._clients.get(key)) is not None:
            return found
        if api_base:
            return self._clients.setdefault(key, HttpClient(parse_address(api_base), api_key))
        return self._clients.setdefault(key, local_client(self._environ))

    def close(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()


_connections = Connections()
