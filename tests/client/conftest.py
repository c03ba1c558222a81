"""Clients over a fake engine that is started on demand, as the real one is."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.client.connection import LocalEngine
from mlx_provider.client.generation import Generation
from mlx_provider.client.http import HttpClient
from mlx_provider.client.messages import Address
from mlx_provider.client.runtime_folder import EngineLock
from mlx_provider.config import Runtime
from mlx_provider.protocol.events import Delta, Done, Event, Failed
from mlx_provider.protocol.requests import GenerateRequest
from waiting import PATIENCE

SCRIPT = Path(__file__).parent.parent / "server" / "fake_engine.py"


@dataclass
class Local:
    """A runtime folder with clients of its on-demand engine."""

    folder: Path
    stack: ExitStack

    def runtime(self, **environment: str) -> Runtime:
        return Runtime(self.folder, {**os.environ, **environment})

    def engine(self, start_limit: float = PATIENCE, **environment: str) -> LocalEngine:
        command = (sys.executable, str(SCRIPT))
        return LocalEngine(self.runtime(**environment), command, start_limit)

    def client(self, **environment: str) -> HttpClient:
        here = self.runtime(**environment)
        address = Address("http://engine", str(here.socket))
        client = HttpClient(address, start=self.engine(**environment).ensure)
        self.stack.callback(client.close)
        return client

    def end(self) -> None:
        """Kill the engine, whichever process it is by now, and wait until it holds no lock."""
        path = self.folder / "engine.lock"
        if text := path.read_text().strip():
            with suppress(ProcessLookupError):
                os.kill(int(text), 9)
            while (free := EngineLock.try_take(path)) is None:
                time.sleep(0.01)
            free.release()


@pytest.fixture
def local() -> Iterator[Local]:
    """A folder of its own, without an engine yet."""
    yield from _folder()


@pytest.fixture(scope="module")
def shared() -> Iterator[Local]:
    """One folder, so mostly one engine, for the tests of a module."""
    yield from _folder()


@pytest.fixture
def client(shared: Local) -> Iterator[HttpClient]:
    client = shared.client()
    yield client
    client.close()


def _folder() -> Iterator[Local]:
    with tempfile.TemporaryDirectory(prefix="mlxp") as name, ExitStack() as stack:
        here = Local(Path(name), stack)
        yield here
        if (here.folder / "engine.lock").exists():
            here.end()


def ask(prompt: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(model="fake", prompt=prompt, **fields)


@pytest.fixture
def request_of() -> Callable[..., GenerateRequest]:
    return ask


@pytest.fixture
def read() -> Callable[[Generation], list[Event]]:
    """Every event of a generation, read by a thread."""

    def all_events(generation: Generation) -> list[Event]:
        events: list[Event] = []
        while batch := generation.get(PATIENCE):
            events += batch
        assert isinstance(events[-1], Done | Failed)
        return events

    return all_events


@pytest.fixture
def text() -> Callable[[list[Event]], str]:
    return lambda events: "".join(e.content for e in events if isinstance(e, Delta))


@pytest.fixture
def tcp_engine() -> Iterator[str]:
    """Address of a fake engine that wants the key `secret`."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MLX_PROVIDER_API_KEY": "secret"},
    )
    with process:
        yield process.stderr.readline().partition(" engine on ")[2].partition(" · ")[0]
        process.kill()
