"""One LiteLLM proxy in front of our engine and of the peers' servers, all with the same model."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_provider.client.connection import Connections
from mlx_provider.config import PREFIX
from mlx_provider.errors import EngineUnavailable, RequestFailed
from mlx_provider.gateway.config import proxy_config, write_config
from mlx_provider.gateway.engine import end_engine
from mlx_provider.gateway.proxy import start_proxy

from .client import THINKING, Client, Messages
from .processes import OURS, Kind, Server, running

NATIVE = f"{OURS.name}-native"
"""Ours with the weights in the checkpoint's own dtype, whatever the device is fast at."""
HELLO: Messages = [{"role": "user", "content": "Hello there, how are you?"}]
IDLE_TIMEOUT = 600


@dataclass(frozen=True)
class Skipped:
    """A side that cannot take part."""

    name: str
    why: str


@contextmanager
def gateway(
    folder: Path, peers: Sequence[Kind], *, native: bool
) -> Iterator[tuple[list[Client], list[Skipped]]]:
    """A client for each side, by the name that its requests give the proxy; each has answered once.

    `native`: ours twice, once with `dtype: native`. The engine is one of its own.
    Raises `NotInstalled` or `EngineUnavailable` where the proxy cannot start.
    """
    with ExitStack() as ending:
        scratch = Path(tempfile.mkdtemp(prefix="mlxp-"))  # short: a socket's path is
        ending.callback(shutil.rmtree, scratch, ignore_errors=True)
        config, skipped = _ours(folder, native=native), []
        for kind in peers:
            try:
                server = ending.enter_context(running(kind, folder, scratch / f"{kind.name}.log"))
                config["model_list"].append(_entry(server))
            except EngineUnavailable as error:
                skipped.append(Skipped(kind.name, error.message))
        environ = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            PREFIX + "RUNTIME_DIR": os.fspath(scratch),
            PREFIX + "IDLE_TIMEOUT": str(IDLE_TIMEOUT),
        }
        connections = Connections(environ)
        ending.callback(connections.close)
        ending.callback(end_engine, connections.client(None, None))
        proxy = start_proxy(write_config(config, scratch), environ)
        ending.callback(proxy.stop)
        proxy.wait_ready()
        clients = []
        for entry in config["model_list"]:
            name = entry["model_name"]
            client = Client(Server(Kind(name, "gateway"), proxy.url, folder, proxy.key, alias=name))
            ending.callback(client.close)
            try:
                client.ask(HELLO, 4)
                clients.append(client)
            except RequestFailed as error:
                skipped.append(Skipped(name, error.message))
        yield clients, skipped


def _ours(folder: Path, *, native: bool) -> dict[str, Any]:
    config = proxy_config(OURS.name, os.fspath(folder))
    if native:
        (entry,) = proxy_config(NATIVE, os.fspath(folder))["model_list"]
        entry["model_info"]["mlx"] = {"dtype": "native"}
        config["model_list"].append(entry)
    return config


def _entry(server: Server) -> dict[str, Any]:
    params = {
        "model": f"openai/{server.folder}",
        "api_base": f"{server.url}/v1",
        "api_key": server.key,
        "extra_body": THINKING,
    }
    return {"model_name": server.kind.name, "litellm_params": params}
