"""`mlx-provider top`, over HTTP, and without one."""

import json
from collections.abc import Iterator

import pytest

from command_line import invoke, told
from local_server import Handler, serving
from mlx_provider.protocol.health import (
    EngineStats,
    MemoryStats,
    ModelMemory,
    PrefixCacheStats,
    RequestStats,
    Stats,
)

BUSY = Stats(
    at=1e9,
    version="1.2.3",
    device="M9",
    pid=77,
    requests=[
        RequestStats(
            id="chatcmpl-\x1b[31mred", model="qwen", state="decode", prompt_tokens=1000,
            cached_tokens=900, prefilled_tokens=100, completion_tokens=42, tokens_per_second=12.5,
            age=9.0,
        ),
        RequestStats(id="second", model="[red]qwen", state="queued", prompt_tokens=5, queued=2.0),
    ],
    engines=[
        EngineStats(
            model="qwen", layout="grouped", queued=1, rows=1, decoded_per_second=12.4,
            drafter="lookup", drafted_tokens=10, accepted_tokens=7,
        )
    ],
    prefix_cache=PrefixCacheStats(entries=1, nodes=20, hit_rate=0.9, prompt_tokens=1000),
    memory=MemoryStats(
        limit=2**34, active=2**33, prefix_cache=2**30,
        models=[ModelMemory(model="qwen", weights=2**32)],
    ),
)  # fmt: skip


class StatsRoute(Handler):
    """The engine's `/v1/stats`, with the key."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        line = BUSY.model_dump_json().encode() + b"\n"
        held = self.headers["authorization"] == "Bearer secret"
        body = json.dumps({"error": {"code": "unauthorized", "message": "no key"}}).encode()
        self.answer(*((line, 200) if held else (body, 401)))


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with serving(StatsRoute) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def run(engine: str, *arguments: str, key: str = "secret") -> tuple[int, str]:
    environ = {"MLX_PROVIDER_API_KEY": key, "COLUMNS": "160"}
    result = invoke("top", "--api-base", engine, *arguments, env=environ)
    return result.exit_code, told(result)


def test_top_once_prints_requests_models_and_memory(engine: str) -> None:
    code, shown = run(engine, "--once")
    assert code == 0, shown
    for wanted in (
        "mlx-provider 1.2.3 · M9 · process 77",
        "1 running, 1 waiting · decode 12 tok/s",
        "weights 4.3 GB",
        "1000/1000 (900 cached)",
        "[red]qwen",
        "7 of 10 accepted (70%)",
    ):
        assert wanted in shown, shown
    assert "\x1b" not in shown, "an id is no command for the terminal"


def test_top_json_prints_the_stats_of_the_engine(engine: str) -> None:
    code, shown = run(engine, "--json")
    assert code == 0
    assert Stats.model_validate_json(shown) == BUSY


def test_top_reports_a_wrong_key_and_a_missing_engine(engine: str) -> None:
    code, shown = run(engine, "--once", key="wrong")
    assert (code, "no key" in shown) == (1, True)
    code, shown = run("http://127.0.0.1:9", "--once")
    assert (code, "no engine answers" in shown) == (1, True)
