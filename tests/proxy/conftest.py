"""One real LiteLLM proxy for all tests of this folder, in front of a scripted engine process."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from mlx_provider.client.connection import Connections
from mlx_provider.client.http import HttpClient
from mlx_provider.client.messages import Address
from mlx_provider.gateway.config import proxy_config, write_config
from mlx_provider.gateway.engine import end_engine, warm_up
from mlx_provider.gateway.proxy import Proxy, start_proxy
from sdk_clients import anthropic_client, openai_client
from tiny import build
from tiny_embedding import as_embedding
from waiting import PATIENCE, wait_until

HERE = Path(__file__).parent
ENGINE_KEY = "engine-key-of-the-tests"


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))


class ScriptedEngine:
    """The engine process, as the tests look into it."""

    def __init__(self, process: subprocess.Popen[bytes], client: HttpClient, url: str) -> None:
        self.process = process
        self.client = client
        self.url = url

    def seen(self) -> dict[str, list]:
        return self.client.cache_report()

    @property
    def request(self) -> dict:
        """The last request."""
        return self.seen()["requests"][-1]

    def wait_for(self, what: Callable[[dict[str, list]], object]) -> None:
        wait_until(lambda: what(self.seen()))

    def heard(self, events: Iterable[Any], is_sign: Callable[[Any], bool]) -> list[Any]:
        """All events of a silent request, which speaks after three signs of life."""
        found, signs = [], 0
        for event in events:
            found.append(event)
            signs += bool(is_sign(event))
            if signs >= 3:  # again at each: the thread that speaks may come to its gate late
                self.client.cache_clear()
        return found


IMPATIENT = """
from mlx_provider.litellm import handler, provider, streams

streams.SILENCE = provider.SILENCE = 0.25
"""
"""The handler, whose silent streams get an event after a quarter of a second."""


@pytest.fixture(scope="session")
def scripted_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    command = [sys.executable, str(HERE / "scripted_engine.py"), "--port", "0"]
    path = tmp_path_factory.mktemp("scripted") / "log"
    environ = {**os.environ, "MLX_PROVIDER_API_KEY": ENGINE_KEY}
    with path.open("wb") as log:
        process = subprocess.Popen(command, env=environ, stderr=log)
    wait_until(lambda: process.poll() is not None or " engine on " in path.read_text())
    url = re.search(r"engine on (\S+)", path.read_text())
    assert url is not None, path.read_text()
    client = HttpClient(Address(url[1]), ENGINE_KEY)
    yield ScriptedEngine(process, client, url[1])
    client.close()
    process.terminate()
    process.wait(PATIENCE)


@pytest.fixture(scope="session")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_embedding(build(tmp_path_factory.mktemp("embedder") / "m", "qwen3"))


@pytest.fixture(scope="session")
def proxy(
    scripted_engine: ScriptedEngine, embedding_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    """A proxy with the model `scripted`; the others are on this machine's own engine."""
    folder = tmp_path_factory.mktemp("proxy")
    config = proxy_config("scripted", "any", api_base=scripted_engine.url, api_key=ENGINE_KEY)
    config["model_list"][0]["model_info"]["mlx"] = {"kv_bits": 8}
    (folder / "impatient.py").write_text(IMPATIENT)
    config["litellm_settings"]["custom_provider_map"][0]["custom_handler"] = "impatient.handler"
    config["model_list"] += proxy_config("demo", "demo")["model_list"]
    (brief,) = proxy_config("brief", "demo")["model_list"]
    brief["model_info"]["mlx"] = {"context_length": 1000}
    config["model_list"] += [brief]
    (unasked,) = proxy_config("unasked", "demo-hybrid")["model_list"]
    unasked["model_info"]["mlx"] = {"context_length": 900}
    config["model_list"] += [unasked]
    (embedder,) = proxy_config("embedder", str(embedding_model))["model_list"]
    embedder["model_info"] = {"mode": "embedding", "mlx": {"pooling": "mean"}}
    config["model_list"] += [embedder]
    config["model_list"] += proxy_config("absent", "nobody/has-this")["model_list"]
    config["model_list"] += proxy_config("anything/*", "*")["model_list"]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}
    running = start_proxy(write_config(config, folder), environ)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


@pytest.fixture
def engine(scripted_engine: ScriptedEngine) -> ScriptedEngine:
    scripted_engine.client.cache_clear()
    return scripted_engine


@pytest.fixture
def client(proxy: Proxy) -> Iterator[openai.OpenAI]:
    """A real OpenAI client of the proxy."""
    with openai_client(proxy.url, proxy.key) as made:
        yield made


@pytest.fixture
def claude(proxy: Proxy) -> Iterator[anthropic.Anthropic]:
    """A real Anthropic client of the proxy."""
    with anthropic_client(proxy.url, proxy.key) as made:
        yield made


@pytest.fixture
def raw(proxy: Proxy) -> Iterator[httpx.Client]:
    """Plain HTTP, as curl would send it."""
    headers = {"authorization": f"Bearer {proxy.key}"}
    with httpx.Client(base_url=proxy.url, headers=headers, trust_env=False, timeout=300) as made:
        yield made


@pytest.fixture
def leave(proxy: Proxy) -> Callable[..., None]:
    """`leave(path, body, once)` asks the proxy and hangs up, without an answer, once that holds."""

    def run(path: str, body: dict[str, Any], once: Callable[[], object]) -> None:
        content, url = json.dumps(body).encode(), httpx.URL(proxy.url)
        head = [
            f"POST {path} HTTP/1.1",
            f"host: {url.host}",
            f"authorization: Bearer {proxy.key}",
            "content-type: application/json",
            f"content-length: {len(content)}",
        ]
        with socket.create_connection((url.host, url.port)) as client:
            client.sendall("\r\n".join([*head, "", ""]).encode() + content)
            wait_until(once)

    return run


@pytest.fixture(scope="session")
def own_engine() -> Iterator[HttpClient]:
    """A look into this machine's engine process, with the shipped model loaded."""
    connections = Connections(dict(os.environ))
    client = connections.client(None, None)
    warm_up(client, "demo")
    yield client
    end_engine(client)
    connections.close()
