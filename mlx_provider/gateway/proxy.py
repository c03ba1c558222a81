"""A LiteLLM proxy as a child process on loopback. `python -m mlx_provider.gateway.proxy` is that
process. It listens on a socket of its parent, which the command `litellm` cannot take (1.106.2)."""

import gc
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..client.runtime_folder import EngineLock, limit_log, tail
from ..errors import EngineUnavailable, NotInstalled
from ..safe_open import create_own

START_LIMIT, STOP_LIMIT, POLL = 120.0, 10.0, 0.1  # seconds
COMMAND = (sys.executable, "-P", "-m", "mlx_provider.gateway.proxy")
PROXY_PACKAGES = ("fastapi", "orjson", "apscheduler")
FOREIGN = tuple(
    "LITELLM_ DATABASE_ REDIS_ STORE_MODEL_IN_DB CONFIG_FILE_PATH WORKER_ SERVER_ROOT_".split()
)
"""Prefixes of the caller's variables that would change the proxy."""


@dataclass(frozen=True)
class Proxy:
    process: subprocess.Popen[bytes]
    url: str
    key: str = field(repr=False)
    log: Path

    def stop(self) -> None:
        """End all its processes, even if the first has ended: SIGTERM, then SIGKILL. Idempotent."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):  # none is left, or only zombies
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_LIMIT)

    def wait_ready(self) -> None:
        """Wait until the proxy answers. Raises `EngineUnavailable` with the log's last lines."""
        if await_answer(self.url, lambda: self.process.poll() is None):
            return
        code = self.process.poll()
        ended = f"ended with exit code {code}"
        what = f"does not answer after {START_LIMIT:g} s" if code is None else ended
        raise EngineUnavailable(f"the LiteLLM proxy {what}: {tail(self.log)}")

    def generate_token(self, model: str, timeout: float) -> None:
        """Request one token of `model`, within `timeout` seconds. Raises `EngineUnavailable`."""
        import httpx

        messages = [{"role": "user", "content": "Hi"}]
        try:
            answer = httpx.post(
                f"{self.url}/v1/chat/completions",
                json={"model": model, "messages": messages, "max_tokens": 1},
                headers={"authorization": f"Bearer {self.key}"},
                timeout=timeout,
                trust_env=False,  # loopback needs no proxy
            )
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"the proxy does not answer: {error}; see {self.log}") from None
        if not answer.is_success:
            raise EngineUnavailable(f"the proxy answers {answer.status_code}: {answer.text[:500]}")


def await_answer(url: str, is_running: Callable[[], bool]) -> bool:
    """Whether a proxy answers within `START_LIMIT` seconds. Waits only while `is_running`."""
    import httpx

    deadline = time.monotonic() + START_LIMIT
    while is_running() and time.monotonic() < deadline:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health/readiness", trust_env=False).is_success:
                return True
        time.sleep(POLL)
    return False


def start_proxy(
    config: Path,
    environ: Mapping[str, str],
    *,
    port: int = 0,
    options: Sequence[str] = (),
    key: str | None = None,
    lock: EngineLock | None = None,
) -> Proxy:
    """Start a proxy for `config` (an absolute path), and do not wait for it. `port` (0: any) is
    bound here, so that no program of another user can take it and receive the key. `key`: by
    default a new one. `lock`: of a persistent proxy, which inherits it and runs in the config's
    folder. Raises `NotInstalled`, and `EngineUnavailable` if the port cannot be bound."""
    from ..server.connections import listen_tcp

    require_proxy()
    listener = listen_tcp("127.0.0.1", port).socket
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections inherit it
    port, key = listener.getsockname()[1], key or make_key()
    log = config.with_name("proxy.log")
    variables = {n: value for n, value in environ.items() if not n.startswith(FOREIGN)}
    variables |= {
        "LITELLM_MASTER_KEY": key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it downloads the table at every start
        "LITELLM_LOG": "ERROR",
        "DISABLE_ADMIN_UI": "True",
        "NO_DOCS": "True",
    }
    command = [*COMMAND, str(listener.fileno()), os.fspath(log), "--config", os.fspath(config)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False", *options]
    with listener, os.fdopen(create_own(log), "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C then reaches only this process, which ends the proxy
            env=variables,
            cwd=None if lock is None else config.parent,
            pass_fds=[listener.fileno(), *([] if lock is None else [lock.descriptor])],
        )
    if lock is not None:
        lock.sign(process.pid)
    return Proxy(process, f"http://127.0.0.1:{port}", key, log)


def make_key() -> str:
    return f"sk-{secrets.token_urlsafe(32)}"


def require_proxy() -> None:
    missing = [name for name in PROXY_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise NotInstalled(
            f"LiteLLM's proxy is not installed ({', '.join(missing)} missing): "
            "pip install '.[proxy]' in the clone of mlx-provider"
        )


def main() -> None:
    """Run `litellm`; uvicorn serves on the parent's listener."""
    descriptor, log, *options = sys.argv[1:]
    gc.disable()  # garbage collection takes a third of the time of LiteLLM's import
    import uvicorn
    from litellm.proxy.proxy_cli import run_server

    limit_log(Path(log))
    original = uvicorn.run

    def run(*args: Any, **kwargs: Any) -> None:
        gc.freeze()
        gc.enable()
        original(*args, **kwargs, fd=int(descriptor))

    uvicorn.run = run
    for option in run_server.params:
        option.envvar = None  # the user's variables are not for this proxy
    run_server(options)


if __name__ == "__main__":
    main()
