"""Which client `connect` gives."""

from typing import Any

import pytest

from mlx_provider.client.connection import Connections, connect
from mlx_provider.client.http import HttpClient
from mlx_provider.errors import BadRequest, Unauthorized


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


def test_another_runtime_folder_gets_another_client() -> None:
    environ = {"MLX_PROVIDER_RUNTIME_DIR": "/one"}
    connections = Connections(environ)
    one = connections.client(None, None)
    environ["MLX_PROVIDER_RUNTIME_DIR"] = "/two"
    assert connections.client(None, None) is not one


def test_connect_returns_one_client_without_contacting_an_engine() -> None:
    assert connect() is connect()
    with pytest.raises(BadRequest, match="api_base"):
        connect("nonsense")


def test_a_tcp_client_needs_the_right_key(tcp_engine: str, request_of: Any, read: Any) -> None:
    connections = Connections({})
    assert read(connections.client(tcp_engine, "secret").submit(request_of("count 2 0")))
    wrong = connections.client(tcp_engine, "wrong")
    with pytest.raises(Unauthorized):
        wrong.submit(request_of("x"))
    with pytest.raises(Unauthorized):
        wrong.health()
    connections.close()
