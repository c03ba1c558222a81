"""`mlx-provider cache`, over HTTP."""

import json
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from command_line import invoke
from local_server import Handler, serving


class CacheRoute(Handler):
    """The engine's `/cache`: full until it is deleted; only with the key."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str, str | None]]

    def do_GET(self) -> None:
        self.note()
        cleared = any(method == "DELETE" for method, *_ in self.seen)
        report = {} if cleared else {"demo": {"entries": 2, "bytes": 4096}}
        self.answer(json.dumps(report).encode())

    def do_DELETE(self) -> None:
        self.note()
        self.answer(b"{}")

    def note(self) -> None:
        self.seen.append((self.command, self.path, self.headers["authorization"]))


@pytest.fixture
def engine() -> Iterator[ThreadingHTTPServer]:
    CacheRoute.seen = []
    with serving(CacheRoute) as server:
        yield server


def run(engine: ThreadingHTTPServer, *arguments: str) -> str:
    address = f"http://127.0.0.1:{engine.server_port}"
    key = {"MLX_PROVIDER_API_KEY": "secret"}
    result = invoke("cache", "--api-base", address, *arguments, env=key)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_cache_prints_the_entries_and_bytes_of_each_model(engine: ThreadingHTTPServer) -> None:
    assert run(engine) == "demo:\n  entries: 2\n  bytes: 4096\n"
    assert CacheRoute.seen == [("GET", "/cache", "Bearer secret")]


def test_cache_json_prints_the_report_as_json(engine: ThreadingHTTPServer) -> None:
    assert json.loads(run(engine, "--json")) == {"demo": {"entries": 2, "bytes": 4096}}


def test_cache_clear_empties_the_cache_and_prints_the_rest(engine: ThreadingHTTPServer) -> None:
    assert run(engine, "--clear") == "the prefix cache is empty\n"
    assert [method for method, *_ in CacheRoute.seen] == ["DELETE", "GET"]
