"""Proxies with several workers in front of this machine's engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_provider.client.connection import Connections
from mlx_provider.client.generation import EngineClient
from mlx_provider.gateway.config import proxy_config, write_config
from mlx_provider.gateway.engine import end_engine, warm_up
from mlx_provider.gateway.proxy import Proxy, start_proxy

StartProxy = Callable[..., Proxy]
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    """A look into the engine process, with the shipped model loaded."""
    connections = Connections(dict(os.environ))
    client = connections.client(None, None)
    warm_up(client, "demo")
    yield client
    end_engine(client)
    connections.close()


@pytest.fixture
def start(tmp_path: Path, engine: EngineClient) -> Iterator[StartProxy]:
    """Start a proxy for the shipped model with some options of LiteLLM's command."""
    started: list[Proxy] = []

    def make(*options: str) -> Proxy:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        config = write_config(proxy_config("demo", "demo"), folder)
        proxy = start_proxy(config, {**os.environ, "HF_HUB_OFFLINE": "1"}, options=options)
        started.append(proxy)
        proxy.wait_ready()
        return proxy

    yield make
    for proxy in started:
        proxy.stop()
