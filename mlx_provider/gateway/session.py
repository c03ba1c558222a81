"""A gateway for one program, from start to end.

Its folder has the same path at the next launch: agents write the path of their settings into system
prompts, so a new path would miss the prefix cache."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ..client import runtime_folder
from ..client.connection import TRANSPORT, local_client
from ..client.generation import EngineClient
from ..client.runtime_folder import EngineLock
from ..config import runtime
from ..errors import EngineUnavailable
from ..records import Client, Gateway
from . import foreground
from .config import ANYTHING, Served, served_config, subagent_config, write_config
from .engine import Tell, open_listener, show_prefill, start_both, watch_engine
from .profile import Prepared, executable, prepare, preview, write_files
from .proxy import Proxy, free_port, master_key, require_proxy, start_proxy

LONGEST_NAME = 60


def first_folder(client: str, model: str, environ: Mapping[str, str]) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{client}-{model}")
    return runtime(environ).folder / "launch" / name[: len(client) + 1 + LONGEST_NAME]


@contextmanager
def launch_folder(client: str, model: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """An empty folder of this user only, removed with the block: the first that no other launch
    locks. The kernel releases the lock of a killed launch, whose files are removed. Raises
    `EngineUnavailable`."""
    runtime_folder.prepare(runtime(environ))
    folder = first = first_folder(client, model, environ)
    first.parent.mkdir(mode=0o700, exist_ok=True)
    numbers = count(2)
    while (lock := EngineLock.try_take(lock_file := Path(f"{folder}.lock"))) is None:
        folder = Path(f"{first}.{next(numbers)}")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock_file.unlink(missing_ok=True)
        lock.release()


PROFILE = "profile"


@dataclass(frozen=True)
class Launch:
    client: Client
    served: Served
    arguments: Sequence[str]
    environ: Mapping[str, str]
    direct: bool = False
    as_subagent: bool = False
    """The client keeps its main model, and gets a subagent with the served one."""

    def run(self, tell: Tell) -> int:
        """Returns the client's exit code.

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
            engine = local_client(self.environ)
            ending.callback(engine.close)
            if self.direct:
                url, key = open_listener(self.served, engine, ending, tell)
            else:
                proxy = self._start(engine, folder, ending, tell)
                url, key = proxy.url, proxy.key
            gateway = self._gateway(url, key, folder / PROFILE)
            prepared = self._prepare(gateway, program)
            write_files(prepared, gateway.folder)
            tell("client", f"{self.client.serves or self.client.name}, {self.client.api} API")
            then = (
                "end the client and launch it again"
                if self.direct
                else "the next request starts another"
            )
            then += f"; see {runtime(self.environ).log}"
            watched = watch_engine(engine.health, then, sys.stderr, tell)
            try:
                with watched, show_prefill(engine.stats, sys.stderr):
                    return foreground.run(prepared.command, prepared.environment(self.environ))
            except OSError as error:
                raise EngineUnavailable(f"{program} cannot be run: {error.strerror}") from None

    def _start(self, engine: EngineClient, folder: Path, ending: ExitStack, tell: Tell) -> Proxy:
        config = (
            subagent_config(self.served, self.client.forwards)
            if self.as_subagent
            else served_config(self.served, ANYTHING)
        )

        def start() -> Proxy:
            proxy = start_proxy(
                write_config(config, folder), {**self.environ, TRANSPORT: "process"}
            )
            ending.callback(proxy.stop)
            return proxy

        return start_both(self.served, engine, start, tell)

    def preview(self) -> list[str]:
        """What `run` would run, line by line. Starts and writes nothing."""
        folder = first_folder(self.client.name, self.served.name, self.environ) / PROFILE
        gateway = self._gateway(f"http://127.0.0.1:{free_port()}", master_key(), folder)
        return preview(self._prepare(gateway), gateway)

    def _prepare(self, gateway: Gateway, program: str | None = None) -> Prepared:
        given = (self.arguments, self.environ, program)
        return prepare(self.client, gateway, *given, as_subagent=self.as_subagent)

    def _gateway(self, url: str, key: str, folder: Path) -> Gateway:
        model = self.served
        sizes = (model.context, model.output)
        return Gateway(url, key, model.name, *sizes, model.images, folder, Path.cwd())
