"""One real LiteLLM proxy for all tests of this folder, in front of a scripted engine process. It is
started as the README says, with the README's config and more models."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from engine_process import found_engine
from litellm_command import write_litellm
from mlx_provider.client.http import HttpClient
from mlx_provider.client.messages import Address
from mlx_provider.gateway.config import proxy_config, write_config
from mlx_provider.gateway.proxy import FOREIGN, Proxy
from ports import free_port
from readme import START, block, small_config
from sdk_clients import anthropic_client, openai_client
from tiny import build
from tiny_embedding import as_embedding
from waiting import PATIENCE, wait_for_proxy, wait_until

HERE = Path(__file__).parent
ENGINE_KEY = "engine-key-of-the-tests"


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))


def refused(reply: httpx.Response, words: str, status: int = 400) -> None:
    """With the reason, and without a trace of our code."""
    assert reply.status_code == status, reply.text[:500]
    assert words in reply.text
    assert "Traceback" not in reply.text
    assert ".py" not in reply.text


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
from mlx_provider.litellm import provider, streams
from mlx_provider.litellm import handler as unused

streams.SILENCE = provider.SILENCE = 0.25
"""
"""A handler that lets silent streams get an event after a quarter of a second."""


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
    own = proxy_config("scripted", "any", api_base=scripted_engine.url, api_key=ENGINE_KEY)
    own["model_list"][0]["model_info"]["mlx"] = {"kv_bits": 8}
    config = {**own, **yaml.safe_load(small_config())}
    config["model_list"] += own["model_list"]
    (folder / "impatient.py").write_text(IMPATIENT)
    impatient = {"provider": "impatient", "custom_handler": "impatient.unused"}
    config["litellm_settings"]["custom_provider_map"].append(impatient)
    (brief,) = model_entries("brief", "demo")
    brief["model_info"]["mlx"] = {"context_length": 1000}
    (unasked,) = model_entries("unasked", "demo-hybrid")
    unasked["model_info"]["mlx"] = {"context_length": 900}
    (embedder,) = model_entries("embedder", str(embedding_model))
    embedder["model_info"] = {"mode": "embedding", "mlx": {"pooling": "mean"}}
    config["model_list"] += [brief, unasked, embedder]
    for name, model in (("demo", "demo"), ("absent", "nobody/has-this"), ("anything/*", "*")):
        config["model_list"] += model_entries(name, model)
    write_config(config, folder)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    paths = (str(write_litellm(folder)), str(Path(sys.executable).parent), environ["PATH"])
    environ |= {"PATH": os.pathsep.join(paths), "PORT": str(port := free_port())}
    environ |= {"PYTHONFAULTHANDLER": "1", "LITELLM_LOG": "ERROR"}
    environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}  # no network
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-ec", block(START)],
            cwd=folder,
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for_proxy(url, process, folder / "log")
        yield Proxy(process, url, (folder / "key").read_text(), folder / "log")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(PATIENCE)


def model_entries(name: str, model: str) -> list[dict[str, Any]]:
    return proxy_config(name, model)["model_list"]


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
def claude(proxy: Proxy) -> Iterator[Any]:
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
    with found_engine(dict(os.environ), "demo") as client:
        yield client
