"""`/v1/stats` of a real engine process."""

from collections.abc import Callable
from typing import Any

from mlx_provider.client.http import HttpClient
from mlx_provider.client.messages import parse_address


def test_it_names_its_process(engine: Any) -> None:
    client = HttpClient(parse_address(f"unix:{engine.folder}/engine.sock"))
    assert client.stats().pid == engine.process.pid
    client.close()


def test_on_tcp_it_takes_the_key(spawn: Callable[..., Any]) -> None:
    engine = spawn("--port", "0", MLX_PROVIDER_API_KEY="secret")
    assert engine.http.get("/v1/stats").status_code == 401
    key = {"authorization": "Bearer secret"}
    assert engine.http.get("/v1/stats", headers=key).status_code == 200
    page = {**key, "origin": "http://elsewhere"}
    assert engine.http.get("/v1/stats", headers=page).status_code == 403
