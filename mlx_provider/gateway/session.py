"""The folder of one launch, with the same path at the next launch: agents write the path of their
settings into system prompts, so a new path would miss the prefix cache.

A gateway for one program, from start to end.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ..client import runtime_folder
from ..client.generation import EngineClient
from ..client.runtime_folder import EngineLock
from ..config import runtime
from ..errors import EngineUnavailable
from ..records import Client, Gateway
from . import foreground
from .config import ANYTHING, Served, served_config, subagent_config, write_config
from .profile import Prepared, executable, prepare, shown, write_files
from .progress import Tell, engine_watched, prefill_shown
from .proxy import Proxy, free_port, master_key, require_proxy, start_proxy
from .start import open_door, own_engine, start_both

LONGEST_NAME = 60


def first_folder(client: str, model: str, environ: Mapping[str, str]) -> Path:
    """The folder, unless another launch of this client and model runs."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{client}-{model}")
    return runtime(environ).folder / "launch" / name[: len(client) + 1 + LONGEST_NAME]


@contextmanager
def launch_folder(client: str, model: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """An empty folder of this user only, removed with the block.

    It has the first name that no other launch locks. The kernel releases the lock of a killed
    launch, whose files are removed. Raises `EngineUnavailable` if the runtime folder cannot be
    used."""
    runtime_folder.prepare(runtime(environ))
    first = first_folder(client, model, environ)
    first.parent.mkdir(mode=0o700, exist_ok=True)
    folder, lock = next(_free(first))
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _lock_file(folder).unlink(missing_ok=True)
        lock.release()


def _free(first: Path) -> Iterator[tuple[Path, EngineLock]]:
    for number in count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}.{number}")
        if (lock := EngineLock.try_take(_lock_file(folder))) is not None:
            yield folder, lock


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


PROFILE = "profile"
NEXT = "the next request starts another"
RESTART = "end the client and launch it again"


@dataclass(frozen=True)
class Launch:
    client: Client
    served: Served
    arguments: Sequence[str]
    environ: Mapping[str, str]
    direct: bool = False
    """Without a proxy."""
    as_subagent: bool = False
    """The client keeps its main model, and gets a subagent with the served one."""

    def run(self, tell: Tell) -> int:
        """Start engine and proxy if necessary, run the client, end the proxy. Returns the client's
        exit code.

        The user's engine ends by itself when idle; folder and proxy (or listener) are always
        removed. Raises `NotInstalled`, `EngineUnavailable`, the errors of loading the model, and
        `foreground.Ended` for a signal before the client runs."""
        program = executable(self.client, self.environ)
        if not self.direct:
            require_proxy()
        with ExitStack() as ending:
            ending.enter_context(foreground.ending_by_signal())
            folder = ending.enter_context(
                launch_folder(self.client.name, self.served.name, self.environ)
            )
            (folder / PROFILE).mkdir(mode=0o700)
            engine = own_engine(self.environ, ending)
            place = (
                open_door(self.served, engine, ending, tell)
                if self.direct
                else self._start(engine, folder, ending, tell)
            )
            gateway = gateway_for(self.served, place.url, place.key, folder / PROFILE)
            prepared = self._prepare(gateway, program)
            write_files(prepared, gateway.folder)
            tell("client", f"{self.client.serves or self.client.name}, {self.client.api} API")
            log = runtime(self.environ).log
            then = RESTART if self.direct else NEXT
            watched = engine_watched(engine.health, f"{then}; see {log}", sys.stderr, tell)
            try:
                with watched, prefill_shown(engine.figures, sys.stderr):
                    return foreground.run(prepared.command, prepared.environment(self.environ))
            except OSError as error:
                raise EngineUnavailable(f"{program} cannot be run: {error.strerror}") from None

    def _start(self, engine: EngineClient, folder: Path, ending: ExitStack, tell: Tell) -> Proxy:
        """Starts both in parallel; both are then ready."""

        def start() -> Proxy:
            config = write_config(self._config(), folder)
            proxy = start_proxy(config, self.environ)
            ending.callback(proxy.stop)
            return proxy

        return start_both(self.served, engine, start, tell)

    def preview(self) -> list[str]:
        """What `run` would run, line by line. Starts and writes nothing."""
        folder = first_folder(self.client.name, self.served.name, self.environ) / PROFILE
        url = f"http://127.0.0.1:{free_port()}"
        gateway = gateway_for(self.served, url, master_key(), folder)
        return shown(self._prepare(gateway), gateway)

    def _prepare(self, gateway: Gateway, program: str | None = None) -> Prepared:
        return prepare(
            self.client,
            gateway,
            self.arguments,
            self.environ,
            program,
            as_subagent=self.as_subagent,
        )

    def _config(self) -> dict[str, Any]:
        if self.as_subagent:
            return subagent_config(self.served, self.client.forwards)
        return served_config(self.served, ANYTHING)


def gateway_for(served: Served, url: str, key: str, folder: Path) -> Gateway:
    return Gateway(
        url=url,
        key=key,
        model=served.name,
        context=served.context,
        output=served.output,
        images=served.images,
        folder=folder,
        workplace=Path.cwd(),
    )
