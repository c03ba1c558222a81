"""The fake engine as a real process, spoken to with plain httpx."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from waiting import PATIENCE, wait_until

SCRIPT = Path(__file__).with_name("fake_engine.py")


@dataclass
class EngineProcess:
    process: subprocess.Popen[str]
    line: str
    """What the engine said when it was ready."""
    http: httpx.Client
    folder: Path

    def lines(self, prompt: str, **fields: Any) -> list[Any]:
        """All event lines of one request."""
        with self.stream(prompt, **fields) as response:
            assert response.status_code == 200, response.read()
            return [json.loads(line) for line in b"".join(response.iter_raw()).splitlines()]

    def stream(self, prompt: str, **fields: Any) -> Any:
        body = {"model": "fake", "prompt": prompt, **fields}
        return self.http.stream("POST", "/v1/generate", json=body)

    def connected(self, method: str, path: str, **fields: Any) -> socket.socket:
        """A connection over which a request was sent, of which nothing was read."""
        body = json.dumps(fields).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: engine\r\ncontent-length: {len(body)}\r\n\r\n"
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(self.folder / "engine.sock"))
        client.sendall(head.encode() + body)
        return client

    def seen(self) -> Any:
        return self.http.get("/cache").json()

    def await_seen(self, key: str, value: str) -> None:
        wait_until(lambda: value in self.seen()[key])

    def end(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(PATIENCE)


@pytest.fixture(scope="module")
def spawn() -> Iterator[Callable[..., EngineProcess]]:
    """`spawn(*options, **environment)` starts a fake engine; on TCP where a port is given.

    files: how many it may open, for good.
    """
    with ExitStack() as stack:

        def start(
            *options: str, folder: Path | None = None, files: int | None = None, **environment: str
        ) -> EngineProcess:
            where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlxp")))
            process = subprocess.Popen(
                [*_limited(files), sys.executable, str(SCRIPT), *options],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment, "MLX_PROVIDER_RUNTIME_DIR": str(where)},
            )
            stack.callback(_end, process)
            line = process.stderr.readline()
            address = line.partition(" engine on ")[2].partition(" · ")[0]
            unix = address.startswith("unix:")
            http = httpx.Client(
                base_url="http://engine" if unix or not address else address,
                transport=httpx.HTTPTransport(
                    uds=address[5:] if unix else None, limits=httpx.Limits(max_connections=None)
                ),
                timeout=PATIENCE,
                trust_env=False,
            )
            stack.callback(http.close)
            return EngineProcess(process, line, http, where)

        yield start


@pytest.fixture(scope="module")
def engine(spawn: Callable[..., EngineProcess]) -> EngineProcess:
    """One engine on a unix socket, shared by the tests of a module."""
    return spawn()


@pytest.fixture(scope="module")
def fake_service() -> Any:
    """The scripted service as a class of this process."""
    spec = importlib.util.spec_from_file_location("fake_engine", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FakeService


def _limited(files: int | None) -> list[str]:
    return [] if files is None else ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh"]


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(PATIENCE)
    process.stderr.close()
