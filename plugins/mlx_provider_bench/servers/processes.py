"""The measured servers: ours and the peers', each in its own process on 127.0.0.1. `python -m
mlx_provider_bench.servers.processes MODULE ARGUMENT...` runs a peer's module after loading the BLAS
that our engine uses: all sides compute with the same one."""

from __future__ import annotations

import os
import runpy
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from mlx_provider.commands import PREFIX, free_port, preload_blas
from mlx_provider.errors import EngineUnavailable

from ..ending import held

Dialect = Literal["generate", "chat", "gateway"]
START_LIMIT = 300.0
"""Seconds for Python, MLX and the weights on a busy machine."""
STOP_LIMIT = 10.0
POLL = 0.2
PREFILL_STEP = "2048"
"""Prompt tokens of one chunk, the same for every side."""


@dataclass(frozen=True)
class Kind:
    name: str
    dialect: Dialect
    """`generate`: our `/v1/generate`; `chat`: OpenAI's `/v1/chat/completions`, with fields that the
    peers need; `gateway`: the same through LiteLLM, whose config has these fields."""
    module: str = ""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    images: bool = True
    takes_model: bool = True


OURS = Kind(
    name="mlx-provider",
    dialect="generate",
    module="mlx_provider.server",
    # No prefix of an earlier run.
    environment={"MLX_PROVIDER_LOG_LEVEL": "warning", "MLX_PROVIDER_DISK_CACHE_BYTES": "0"},
    takes_model=False,
)
MLX_LM = Kind(
    name="mlx_lm.server",
    dialect="chat",
    module="mlx_lm.server",
    arguments=("--prefill-step-size", PREFILL_STEP, "--log-level", "WARNING"),
    images=False,
)
MLX_VLM = Kind(
    name="mlx_vlm.server",
    dialect="chat",
    module="mlx_vlm.server",
    arguments=("--prefill-step-size", PREFILL_STEP),
    environment={"APC_ENABLED": "1", "APC_DISK_ENABLED": "0", "APC_NUM_BLOCKS": "8192"},
)
"""With its prefix cache on, which is off by default, and room for 128k tokens."""


@dataclass(frozen=True)
class Server:
    kind: Kind
    url: str
    folder: Path
    key: str
    """Ours needs it, others ignore it."""
    alias: str = ""
    """The name of the model; unset: the path of its folder."""

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    @property
    def model(self) -> str:
        return self.alias or str(self.folder)


class Kept:
    def __init__(self, kind: Kind, folder: Path, log: Path) -> None:
        self.kind = kind
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None
        url, key = f"http://127.0.0.1:{free_port()}", secrets.token_urlsafe()
        self.server = Server(kind, url, folder, key)

    def start(self) -> Server:
        """Returns once it answers. Raises `EngineUnavailable` with the log's last lines."""
        kind, folder = self.kind, self.server.folder
        own = {PREFIX + "API_KEY": self.server.key, PREFIX + "MODEL_ROOTS": str(folder)}
        with held(), self._log.open("ab") as out:
            self.process = subprocess.Popen(
                [*self.command(), *self._arguments()],
                stdin=self.stdin,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the server
                env=os.environ | {"HF_HUB_OFFLINE": "1"} | own | dict(kind.environment),
            )
        try:
            _await_health(self.process, self.server, self._log)
        except EngineUnavailable:
            self.stop()
            raise
        return self.server

    stdin = subprocess.DEVNULL

    def command(self) -> list[str]:
        return [sys.executable, "-m", __spec__.name, self.kind.module]

    def _arguments(self) -> list[str]:
        port = self.server.url.rpartition(":")[2]
        arguments = [*self.kind.arguments, "--host", "127.0.0.1", "--port", port]
        model = ["--model", str(self.server.folder)] if self.kind.takes_model else []
        return arguments + model

    @property
    def death(self) -> str:
        code = None if self.process is None else self.process.poll()
        return "" if code is None else _ended(code)

    def stop(self) -> None:
        if self.process is not None:
            stop(self.process)


@contextmanager
def running(kind: Kind, folder: Path, log: Path) -> Iterator[Server]:
    """A server for the model in `folder`; stopped at the end. Raises `EngineUnavailable` with the
    log's last lines if it does not start."""
    kept = Kept(kind, folder, log)
    try:
        yield kept.start()
    finally:
        kept.stop()


def _ended(code: int) -> str:
    return f"its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"


def stop(process: subprocess.Popen[Any], limit: float = STOP_LIMIT) -> None:
    """Kill a process that does not end. Idempotent."""
    process.terminate()
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await_health(process: subprocess.Popen[bytes], server: Server, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            address = server.url + "/health"
            if httpx.get(address, headers=server.headers, timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL)
    tail = log.read_text(errors="replace").splitlines()[-3:]
    raise EngineUnavailable(f"{server.kind.name} does not come up: {' / '.join(tail)}")


def _run_module(arguments: list[str]) -> None:
    preload_blas()
    module, *rest = arguments
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_module(sys.argv[1:])
