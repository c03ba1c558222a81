"""An engine process of its own, and a client on its socket."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from mlx_provider.client.connection import Connections
from mlx_provider.client.http import HttpClient
from mlx_provider.gateway.engine import end_engine, warm_up

REQUEST_SECONDS = 300.0
PROGRAM = """
import json, sys
from mlx_provider.server.run import main
main(fixed=json.loads(sys.argv.pop()))
"""


@dataclass(frozen=True)
class EngineProcess:
    """`http` speaks to its socket."""

    process: subprocess.Popen[bytes]
    http: httpx.Client
    socket: Path

    def ask(self, content: Any, **fields: Any) -> tuple[int, list[dict[str, Any]]]:
        """Status and events of a request with one user message; an error is the one event."""
        body = {"model": "demo", "messages": [{"role": "user", "content": content}], **fields}
        return self.post(json.dumps({"max_tokens": 1, **body}).encode())

    def post(self, body: Any, **options: Any) -> tuple[int, list[dict[str, Any]]]:
        reply = self.http.post("/v1/generate", content=body, **options)
        if reply.status_code != 200:
            return reply.status_code, [reply.json()["error"]]
        return 200, [event for line in reply.text.splitlines() for event in json.loads(line)]

    def memory(self, which: str) -> int:
        """`VmRSS` (now) or `VmHWM` (peak) in bytes (Linux)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith(which))
        return int(line.split()[1]) * 1024

    def forget_peak(self) -> int:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.memory("VmRSS")


@contextmanager
def engine_process(
    fixed: Mapping[str, Any] = MappingProxyType({}), **environ: str
) -> Iterator[EngineProcess]:
    """With this environment and these variables. `fixed`: values that no variable sets
    (`settings.FixedSettings`)."""
    folder = Path(tempfile.mkdtemp(prefix="mlxp-"))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps({"log_level": "error", **fixed})],
        env={**os.environ, **environ, "MLX_PROVIDER_RUNTIME_DIR": str(folder)},
        stderr=subprocess.PIPE,
    )
    try:
        while b" engine on " not in (line := process.stderr.readline()):
            assert line, "the engine did not start"
        socket = folder / "engine.sock"
        transport = httpx.HTTPTransport(uds=str(socket), limits=httpx.Limits(max_connections=None))
        with httpx.Client(
            base_url="http://engine", transport=transport, timeout=REQUEST_SECONDS, trust_env=False
        ) as http:
            yield EngineProcess(process, http, socket)
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def found_engine(environ: Mapping[str, str], model: str = "") -> Iterator[HttpClient]:
    """A look into the engine process that clients find, with a model loaded, and its end."""
    connections = Connections(environ)
    client = connections.client(None, None)
    try:
        if model:
            warm_up(client, model)
        yield client
    finally:
        end_engine(client)
        connections.close()
