"""`/v1/stats` of a real engine process: once, as a stream, bounded, and ended with the engine."""

import asyncio
import json
import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from mlx_provider.client.http import HttpClient
from mlx_provider.client.messages import parse_address, parse_stats
from mlx_provider.errors import EngineUnavailable
from mlx_provider.server.stats import STREAMS


def client_of(engine: Any) -> HttpClient:
    return HttpClient(parse_address(f"unix:{engine.folder}/engine.sock"))


def test_once_and_as_a_stream(engine: Any) -> None:
    client = client_of(engine)
    assert client.stats().pid == engine.process.pid
    with engine.http.stream("GET", "/v1/stats?stream=0.2") as response:
        lines = response.iter_lines()
        first, second = json.loads(next(lines)), json.loads(next(lines))
    assert first["at"] < second["at"]
    lines = client.watch(0.2)
    assert parse_stats(next(lines)).pid == engine.process.pid
    lines.close()
    lines.close()
    client.close()


@pytest.mark.parametrize("every", ["", "often", "0.1", "61", "nan", "-1"])
def test_a_rate_out_of_bounds_is_refused(engine: Any, every: str) -> None:
    answer = engine.http.get("/v1/stats", params={"stream": every})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream"


def test_only_so_many_may_watch(engine: Any, wait_until: Callable[..., None]) -> None:
    with ExitStack() as watching:
        replies = [
            watching.enter_context(engine.http.stream("GET", "/v1/stats?stream=60")).iter_lines()
            for _ in range(STREAMS)
        ]
        assert all(next(reply) for reply in replies)
        refused = engine.http.get("/v1/stats?stream=60")
        assert refused.status_code == 429
        assert engine.http.get("/v1/stats").status_code == 200

    def let_in() -> bool:
        with engine.http.stream("GET", "/v1/stats?stream=60") as reply:
            return reply.status_code == 200

    wait_until(let_in)


async def test_who_comes_at_once_is_counted_at_once(engine: Any) -> None:
    transport = httpx.AsyncHTTPTransport(uds=f"{engine.folder}/engine.sock")
    async with httpx.AsyncClient(
        transport=transport, base_url="http://engine", timeout=300
    ) as http:
        asked = [http.build_request("GET", "/v1/stats?stream=60") for _ in range(STREAMS + 8)]
        replies = await asyncio.gather(*(http.send(one, stream=True) for one in asked))
        refused = [reply.status_code for reply in replies if reply.status_code != 200]
        for reply in replies:
            await reply.aclose()
    assert refused == [429] * 8


def test_the_stream_ends_with_the_engine(spawn: Callable[..., Any]) -> None:
    engine = spawn()
    client = client_of(engine)
    lines = client.watch(60)
    next(lines)
    engine.process.send_signal(signal.SIGTERM)
    assert list(lines) == []
    assert engine.process.wait(300) == 0
    with pytest.raises(EngineUnavailable):
        next(client.watch(1))
    client.close()


def test_on_tcp_it_takes_the_key(spawn: Callable[..., Any]) -> None:
    engine = spawn("--port", "0", MLX_PROVIDER_API_KEY="secret")
    assert engine.http.get("/v1/stats").status_code == 401
    key = {"authorization": "Bearer secret"}
    assert engine.http.get("/v1/stats", headers=key).status_code == 200
    page = {**key, "origin": "http://elsewhere"}
    assert engine.http.get("/v1/stats", headers=page).status_code == 403


def test_who_watches_keeps_no_idle_engine_alive(spawn: Callable[..., Any]) -> None:
    engine = spawn()
    with engine.http.stream("GET", "/v1/stats?stream=60") as response:
        next(response.iter_lines())
        ends = engine.http.post("/v1/stop", json={"reason": "test", "when": "alone"})
        assert ends.json()["ends"] is True
        assert engine.process.wait(300) == 0
