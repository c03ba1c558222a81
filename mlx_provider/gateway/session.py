"""A gateway for one program: engine, proxy and profile, from the start to the end of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..client.generation import EngineClient
from ..errors import EngineUnavailable
from ..records import Client, Gateway
from . import foreground
from .config import ANYTHING, Served, served_config, write_config
from .launch_folder import first_folder, launch_folder
from .prefill_progress import prefill_shown
from .profile import executable, prepare, shown, write_files
from .proxy import Proxy, free_port, master_key, require_proxy, start_proxy
from .start import Tell, own_engine, start_both

PROFILE = "profile"
"""The client's part of the folder of a launch."""


@dataclass(frozen=True)
class Launch:
    """What to start, on which model."""

    client: Client
    served: Served
    arguments: Sequence[str]
    environ: Mapping[str, str]

    def run(self, tell: Tell) -> int:
        """Start what is not running, run the client, end the proxy; the client's exit code.

        The engine is this user's and ends by itself, as with any other client of it. Of folder and
        proxy nothing is left, whatever ends this. Raises `NotInstalled`, `EngineUnavailable` and
        what loading the model raises; `foreground.Ended` for a signal before the client runs.
        """
        program = executable(self.client, self.environ)
        require_proxy()
        with ExitStack() as ending:
            ending.enter_context(foreground.ending_by_signal())
            folder = ending.enter_context(
                launch_folder(self.client.name, self.served.name, self.environ)
            )
            (folder / PROFILE).mkdir(mode=0o700)
            engine = own_engine(self.environ, ending)
            proxy = self._start(engine, folder, ending, tell)
            gateway = gateway_for(self.served, proxy.url, proxy.key, folder / PROFILE)
            prepared = prepare(self.client, gateway, self.arguments, self.environ, program=program)
            write_files(prepared, gateway.folder)
            tell("client", f"{self.client.serves or self.client.name}, {self.client.api} API")
            try:
                with prefill_shown(engine.figures, sys.stderr):
                    return foreground.run(prepared.command, prepared.environment(self.environ))
            except OSError as error:
                raise EngineUnavailable(f"{program} cannot be run: {error.strerror}") from None

    def _start(self, engine: EngineClient, folder: Path, ending: ExitStack, tell: Tell) -> Proxy:
        """Engine and proxy, side by side; both are ready."""

        def start() -> Proxy:
            config = write_config(served_config(self.served, ANYTHING), folder)
            proxy = start_proxy(config, self.environ)
            ending.callback(proxy.stop)
            return proxy

        return start_both(self.served, engine, start, tell)

    def preview(self) -> list[str]:
        """What `run` would run the client with, line by line. Starts and writes nothing."""
        folder = first_folder(self.client.name, self.served.name, self.environ) / PROFILE
        url = f"http://127.0.0.1:{free_port()}"
        gateway = gateway_for(self.served, url, master_key(), folder)
        return shown(prepare(self.client, gateway, self.arguments, self.environ), gateway)


def gateway_for(served: Served, url: str, key: str, folder: Path) -> Gateway:
    """What a client is told."""
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
