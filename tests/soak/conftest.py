"""Proxies with several workers in front of this machine's engine."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine_process import found_engine
from mlx_provider.client.http import HttpClient
from mlx_provider.gateway.config import proxy_config, write_config
from mlx_provider.gateway.proxy import Proxy, make_key, start_proxy
from ports import free_port

StartProxy = Callable[..., Proxy]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="module")
def engine() -> Iterator[HttpClient]:
    """A look into the engine process, with the shipped model loaded."""
    with found_engine(dict(os.environ), "demo") as client:
        yield client


def start_litellm(config: Path, environ: dict[str, str], options: Sequence[str]) -> Proxy:
    port, key, log = free_port(), make_key(), config.with_name("proxy.log")
    command = [Path(sys.executable).with_name("litellm"), "--config", config]
    command += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False", *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environ, "LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        )
    return Proxy(process, f"http://127.0.0.1:{port}", key, log)


@pytest.fixture
def start(tmp_path: Path, engine: HttpClient) -> Iterator[StartProxy]:
    """Start a proxy for the shipped model with some options of LiteLLM's command. Ours runs on
    uvicorn; other servers bind the port themselves, so LiteLLM's own command starts them."""
    started: list[Proxy] = []

    def make(*options: str) -> Proxy:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        config = write_config(proxy_config("demo", "demo"), folder)
        environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if any(option.startswith("--run_") for option in options):
            proxy = start_litellm(config, environ, options)
        else:
            proxy = start_proxy(config, environ, options=options)
        started.append(proxy)
        proxy.wait_ready()
        return proxy

    yield make
    for proxy in started:
        proxy.stop()
