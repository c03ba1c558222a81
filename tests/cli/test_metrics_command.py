"""`mlx-provider metrics`: printed, and served to who may have them."""

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from local_server import serving
from mlx_provider.cli.app import build
from mlx_provider.client.http import HttpClient
from mlx_provider.client.messages import parse_address
from mlx_provider.registry import PluginRegistry
from mlx_provider.server.metrics_page import metrics_page

MAIN = "from mlx_provider.cli import main; main()"
TOLD = "# HELP mlx_provider_models_loaded Models.\nmlx_provider_models_loaded 1.0\n"


class Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(TOLD)))
        self.end_headers()
        self.wfile.write(TOLD.encode())

    def log_message(self, *arguments: object) -> None:
        """Nothing on stderr."""


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with serving(Metrics) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def run(*arguments: str) -> tuple[int, str]:
    cli = build(PluginRegistry.discover({"MLX_PROVIDER_PLUGINS": ""}))
    result = CliRunner().invoke(cli, ["metrics", *arguments])
    return result.exit_code, result.stdout + str(result.exception or "")


def test_printed(engine: str) -> None:
    assert run("--api-base", engine) == (0, TOLD)
    code, said = run("--api-base", "http://127.0.0.1:9")
    assert (code, "no engine answers" in said) == (1, True)


def test_without_a_key_on_loopback_alone(engine: str) -> None:
    code, said = run("--port", "0", "--host", "0.0.0.0", "--no-key", "--api-base", engine)
    assert (code, "need a key" in said) == (1, True)


def test_served_with_a_key_that_is_made_once(engine: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "metrics", "--port", "0", "--api-base", engine],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        found = re.match(r"metrics on (\S+) · key: (\S+)", process.stdout.readline())
        assert found is not None
        url, file = found[1], Path(found[2])
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.name == "metrics.key", "not the engine's, which may do more"
        with httpx.Client(trust_env=False, timeout=300) as http:
            assert http.get(url).status_code == 401
            key = {"authorization": f"Bearer {file.read_text().strip()}"}
            assert http.get(url, headers=key).text.startswith(TOLD)
            assert http.get(url.removesuffix("/metrics") + "/cache", headers=key).status_code == 404
    finally:
        process.terminate()
        process.wait(300)
        process.stdout.close()


async def test_up_tells_whether_an_engine_answers(engine: str) -> None:
    for address, up in ((engine, 1), ("http://127.0.0.1:9", 0)):
        client = HttpClient(parse_address(address))
        transport = httpx.ASGITransport(metrics_page(client, None, ()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            answer = await http.get("/metrics")
            assert answer.status_code == 200
            assert answer.text.endswith(f"mlx_provider_up {up}\n")
            assert answer.text.startswith(TOLD) == bool(up)
            page_of_another = await http.get("/metrics", headers={"origin": "http://elsewhere"})
            assert page_of_another.status_code == 403
            rebound = await http.get("/metrics", headers={"host": "page.example"})
            assert rebound.status_code == 403
        client.close()
