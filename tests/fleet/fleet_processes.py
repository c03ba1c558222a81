"""Engines on TCP, proxies in front of them and a Redis beside: real processes on loopback."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from mlx_provider.gateway.proxy import FOREIGN
from ports import free_port

COMMAND = (sys.executable, "-P", "-m", "litellm.proxy.proxy_cli")
PAGE = Path(__file__).parents[2] / "docs" / "operations" / "several-machines.md"
ENGINES, LARGER = map(
    yaml.safe_load, re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
)
"""The two configurations of the page."""
KEY = "sk-fleet"
PATIENCE = 400.0
"""Seconds until a process counts as failed to start, or to end."""


@dataclass
class Process:
    """A process on a port of its own."""

    folder: Path
    port: int = field(default_factory=free_port, kw_only=True)
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal and wait for its end. Does nothing where it does not run."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(number)
            process.wait(PATIENCE)


@dataclass
class TcpEngine(Process):
    """An engine that may end and start again at the same address with the same key."""

    environ: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """Of `mlx_provider.server.run`."""

    @property
    def key(self) -> str:
        return f"key-of-{self.port}"

    def start(self) -> None:
        """Start it; `wait` tells when it listens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = {"MLX_PROVIDER_API_KEY": self.key, "MLX_PROVIDER_RUNTIME_DIR": str(self.folder)}
        command = [sys.executable, "-m", "mlx_provider.server.run", "--host", "127.0.0.1"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *self.options],
                env={**os.environ, **self.environ, **own},
                stdout=log,
                stderr=log,
            )

    def wait(self) -> None:
        """Return once it answers."""
        wait_for(lambda: self._get("/health"), self._running(), self.folder / "log")

    def ask(self, path: str) -> Any:
        """What it answers to `GET path`."""
        return self._get(path).json()

    def _get(self, path: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.get(self.url + path, headers=headers, trust_env=False, timeout=PATIENCE)

    def _running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process


@dataclass
class Proxy(Process):
    """A LiteLLM proxy of the `config.yaml` in a folder, on a port of its own."""

    variables: Mapping[str, str]

    def start(self) -> None:
        own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        own |= {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        command = [*COMMAND, "--config", "config.yaml", "--host", "127.0.0.1"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), "--telemetry", "False"],
                cwd=self.folder,
                env={**own, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait(self) -> None:
        """Return once it answers."""
        assert self.process is not None
        ready = f"{self.url}/health/readiness"
        wait_for(
            lambda: httpx.get(ready, trust_env=False, timeout=PATIENCE), self.process, self._log
        )

    @property
    def _log(self) -> Path:
        return self.folder / f"proxy-{self.port}.log"


@dataclass
class Redis(Process):
    """Debian's `redis-server` on loopback, which keeps nothing."""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "redis.log"
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self.folder)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        wait_for(self._ping, self.process, log)

    def _ping(self) -> None:
        import redis

        try:
            with redis.Redis(port=self.port) as client:
                client.ping()
        except redis.RedisError as error:
            raise httpx.ConnectError(str(error)) from None


def wait_for(asked: Callable[[], object], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} does not answer: {log.read_text()[-4000:]}")
        try:
            asked()
        except httpx.HTTPError:
            time.sleep(0.05)
        else:
            return


def written(folder: Path, config: Any) -> Path:
    """The folder of a proxy with this configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder
