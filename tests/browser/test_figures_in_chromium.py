"""`mlx-provider top --web` in a real browser, over a real engine that works."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.client.address import parse_address
from mlx_provider.client.http import HttpClient
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.protocol.sampling import Sampling
from mlx_provider.testing.tiny import build

pytestmark = pytest.mark.browser

SECRET = "The vault opens at midnight by the eastern door. "
QUIET = dict.fromkeys(range(8), -100.0)
MAIN = "from mlx_provider.cli import main; main()"
SHOTS = os.environ.get("SCREENSHOTS")
"""Folder to leave pictures in, for people."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("web")
    build(made / "tiny-qwen", "qwen3")
    return made


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="mlxp") as runtime:
        environ = {**os.environ, "MLX_PROVIDER_RUNTIME_DIR": runtime, "MLX_PROVIDER_MAX_ROWS": "4"}
        process = subprocess.Popen(
            [sys.executable, "-m", "mlx_provider.server"],
            stderr=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
        assert process.stderr is not None
        next(line for line in process.stderr if " engine on " in line)
        reading = threading.Thread(target=process.stderr.read)
        reading.start()
        process.runtime = runtime  # type: ignore[attr-defined]
        yield process
        process.terminate()
        process.wait(30)
        reading.join()
        process.stderr.close()


@pytest.fixture(scope="module")
def page(engine: Any) -> Iterator[str]:
    environ = {**os.environ, "MLX_PROVIDER_RUNTIME_DIR": engine.runtime}
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "top", "--web", "--every", "0.3"],
        stdout=subprocess.PIPE, text=True, env={**environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.terminate()
    process.wait(30)
    process.stdout.close()


@pytest.fixture(scope="module")
def client(engine: Any) -> Iterator[HttpClient]:
    made = HttpClient(parse_address(f"unix:{engine.runtime}/engine.sock"))
    yield made
    made.close()


def ask(client: HttpClient, folder: Path, text: str, tokens: int) -> Any:
    return client.submit(
        GenerateRequest(
            model=str(folder / "tiny-qwen"),
            messages=[{"role": "user", "content": text}],
            max_tokens=tokens,
            sampling=Sampling(temperature=1, seed=1, logit_bias=QUIET),
        )
    )


def test_it_shows_what_runs(browser: Any, page: str, client: HttpClient, folder: Path) -> None:
    browser.open(page)
    browser.until("document.querySelector('#status').textContent === 'live'")
    assert "nobody asks anything" in browser.text("#requests")
    running = [ask(client, folder, SECRET * 8 + str(i), 400) for i in range(6)]
    browser.until("document.querySelectorAll('.state.decode').length === 4")
    assert browser.value("document.querySelectorAll('.state.queued').length") == 2
    browser.until("document.querySelectorAll('#engines rect.f-green').length > 4")
    if SHOTS:
        for name, dark, width in (
            ("light", False, 1280),
            ("dark", True, 1280),
            ("small", True, 560),
        ):
            browser.dark(dark)
            browser.width(width)
            browser.until("true")
            browser.screenshot(Path(SHOTS) / f"{name}.png")
    for each in running:
        each.close()
    browser.until("document.querySelectorAll('.state').length === 0")
    assert "tiny-qwen" in browser.text("#engines")
    assert "left what is stored at" in browser.text("#lookups")
    assert "hits" in browser.text("#tree")
    assert "weights" in browser.text("#memory")
    assert "vault" not in browser.value("document.documentElement.outerHTML")


def test_it_asks_nobody_else(browser: Any, page: str) -> None:
    address = page.partition("#")[0]
    assert set(browser.requests) <= {address, address + "figures", "data:,"}, browser.requests
    assert browser.complaints == [], "nothing that its policy refuses"
    blocked = "fetch('http://127.0.0.1:9/').then(() => 'let through', () => 'refused')"
    assert browser.value(blocked) == "refused"
    assert any("Content Security Policy" in said for said in browser.complaints)
    browser.complaints.clear()


def test_without_the_key_it_says_so(browser: Any, page: str) -> None:
    browser.open(page.partition("#")[0])
    browser.until("document.querySelector('#trouble').textContent.includes('#key')")
    browser.open(page + "x")
    browser.until("document.querySelector('#trouble').textContent.includes('key')")
    assert browser.text("#tiles") == ""


def test_another_page_gets_nothing(browser: Any, page: str) -> None:
    """A page of another origin, even with the key: its reply is refused and unread."""
    address, _, key = page.partition("#")
    browser.open(address.replace("127.0.0.1", "localhost"))
    browser.until("document.readyState === 'complete'")
    asked = (
        f"fetch('{address}figures', {{headers: {{Authorization: 'Bearer {key}'}}}})"
        ".then((r) => r.text(), (e) => 'refused')"
    )
    assert browser.value(asked) == "refused"


def test_the_engine_ends(browser: Any, page: str, engine: Any) -> None:
    browser.open(page)
    browser.until("document.querySelector('#status').textContent === 'live'")
    engine.terminate()
    browser.until("document.querySelector('#status').textContent === 'not connected'")
    assert "engine" in browser.text("#trouble")
