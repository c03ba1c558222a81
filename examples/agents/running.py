"""A client's process, with a home of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from clients import Agent
from gateway import Gateway, model_name
from installed import Installed

from mlx_provider import records
from mlx_provider.gateway.engine import LEAST_TOKENS
from mlx_provider.gateway.launch import prepare
from mlx_provider.registry import PluginRegistry

RECORDS = PluginRegistry.discover({"MLX_PROVIDER_PLUGINS": "clients"})
TOKEN_BYTES = 8
"""Of a prompt, at most."""
OUTPUT = 4096
"""Tokens of an answer, as clients are told."""
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Running:
    """A client that has been started; `work` is the folder that it works in."""

    process: subprocess.Popen[bytes]
    work: Path
    output: Path
    begun: float
    gateway: Gateway
    least: int
    """Tokens of its own prompt, at least; what it asks before, such as for a title, has fewer."""

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ended(self) -> bool:
        return self.process.poll() is not None

    def replies(self) -> bool:
        """Whether the reply to its own prompt is in its middle."""
        return self.gateway.replies(self.least)

    def wait(self, limit: float) -> str:
        """What it has said, once it ends or its time is up.

        Raises `EngineUnavailable` as soon as proxy or engine are gone.
        """
        with self:
            self.gateway.wait(self.ended, limit)
        return self.said

    @property
    def said(self) -> str:
        return COLOURS.sub("", self.output.read_text(errors="replace"))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it and whatever it has started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()


def start(
    agent: Agent,
    gateway: Gateway,
    installed: Installed,
    prompt: str,
    *,
    context: int,
    told: int | None = None,
) -> Running:
    """Start a client with a prompt. `told`: what it takes the context for."""
    home = Path(tempfile.mkdtemp(prefix="agent-", dir=gateway.engine.log.parent))
    work, folder, output = home / "work", home / "profile", home / "said.txt"
    work.mkdir()
    folder.mkdir()
    path = os.pathsep.join([str(installed.node), "/usr/local/bin", "/usr/bin", "/bin"])
    environ = {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb"}
    place = records.Gateway(
        url=gateway.proxy.url,
        key=gateway.proxy.key,
        model=model_name(context),
        context=told or context,
        output=OUTPUT,
        images=False,
        folder=folder,
        workplace=work,
    )
    record = RECORDS.client(agent.record)
    prepared = prepare(record, place, agent.alone(prompt), environ)
    prepared.write(folder)
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [*agent.program(installed), *prepared.command[1:]],
            cwd=work,
            env={**prepared.environment(environ), **agent.unasked},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    least = min(LEAST_TOKENS, record.prompt_bytes // TOKEN_BYTES)
    return Running(process, work, output, time.monotonic(), gateway, least)
