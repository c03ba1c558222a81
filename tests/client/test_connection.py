"""Which client `connect` gives, and the two carriers behind one interface."""

import os
from typing import Any

import pytest

from mlx_provider.client import connection
from mlx_provider.client.connection import Connections, InProcessClient, connect
from mlx_provider.client.http import HttpClient
from mlx_provider.errors import BadRequest, EngineUnavailable, Unauthorized
from mlx_provider.protocol.events import Done


def test_one_client_per_address_and_key() -> None:
    connections = Connections({})
    here = connections.client(None, None)
    there = connections.client("http://127.0.0.1:9", "key")
    assert connections.client(None, None) is here
    assert connections.client("http://127.0.0.1:9", "key") is there
    assert connections.client("http://127.0.0.1:9", "other") is not there
    assert isinstance(there, HttpClient)
    connections.close()
    assert connections.client(None, None) is not here


def test_another_runtime_folder_is_another_engine() -> None:
    environ = {"MLX_PROVIDER_RUNTIME_DIR": "/one"}
    connections = Connections(environ)
    one = connections.client(None, None)
    environ["MLX_PROVIDER_RUNTIME_DIR"] = "/two"
    assert connections.client(None, None) is not one


def test_connect_contacts_nobody() -> None:
    assert connect() is connect()
    with pytest.raises(BadRequest, match="api_base"):
        connect("nonsense")


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(BadRequest, match="MLX_PROVIDER_TRANSPORT"):
        Connections({"MLX_PROVIDER_TRANSPORT": "pigeon"}).client(None, None)


@pytest.fixture
def in_process(fake_service: Any, monkeypatch: pytest.MonkeyPatch) -> Connections:
    build = lambda environ: InProcessClient(fake_service)  # noqa: E731
    monkeypatch.setattr(connection, "_build_in_process", build)
    monkeypatch.setattr(connection.atexit, "register", lambda work: work)
    return Connections({"MLX_PROVIDER_TRANSPORT": "in_process"})


def test_in_process_is_the_same_interface(
    in_process: Connections, request_of: Any, read: Any, text: Any, wait_until: Any
) -> None:
    client = in_process.client(None, None)
    assert in_process.client(None, None) is client
    assert isinstance(client, InProcessClient)
    events = read(client.submit(request_of("count 3 0.001")))
    assert text(events) == "0 1 2 "
    assert isinstance(events[-1], Done)
    client.submit(request_of("wait", id="dropped"))
    wait_until(lambda: "dropped" in client.cache_report()["cancelled"])
    assert client.health().ok
    assert client.metrics()
    client.cache_clear()
    in_process.close()
    with pytest.raises(EngineUnavailable):
        client.submit(request_of("count 1 0"))


def test_in_process_with_an_address_goes_there(in_process: Connections) -> None:
    assert isinstance(in_process.client("http://127.0.0.1:9", None), HttpClient)


def test_in_process_after_fork_says_so(in_process: Connections) -> None:
    in_process.client(None, None)
    hear, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            in_process.client(None, None)
        except EngineUnavailable as error:
            os.write(tell, error.message.encode())
        finally:
            os._exit(0)
    os.close(tell)
    with os.fdopen(hear, "rb") as report:
        assert b"does not survive fork" in report.read()
    os.waitpid(child, 0)


def test_tcp_with_a_key(tcp_engine: str, request_of: Any, read: Any) -> None:
    connections = Connections({})
    assert read(connections.client(tcp_engine, "secret").submit(request_of("count 2 0")))
    wrong = connections.client(tcp_engine, "wrong")
    with pytest.raises(Unauthorized):
        wrong.submit(request_of("x"))
    with pytest.raises(Unauthorized):
        wrong.health()
    connections.close()
