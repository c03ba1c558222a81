"""A real Prometheus over a real engine."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_provider.client.http import HttpClient
from mlx_provider.client.messages import parse_address
from mlx_provider.protocol.requests import GenerateRequest
from tiny import build
from waiting import wait_until

pytestmark = pytest.mark.prometheus

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "mlx-provider.json"
CONFIG = """\
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs:
- job_name: served
  static_configs: [{{targets: ["{served}"]}}]
  authorization: {{credentials: secret}}
"""


@dataclass
class Place:
    """Prometheus, and whom it scrapes."""

    http: httpx.Client
    engine: HttpClient
    metrics: str

    def ask(self, query: str) -> list[Any]:
        answer = self.http.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", (query, answer)
        return answer["data"]["result"]

    def number(self, query: str) -> float | None:
        found = self.ask(query)
        return float(found[0]["value"][1]) if found else None


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., re.Match[str]]]:
    """`start(command, pattern, **environment)`: what its first line that matches says."""
    with ExitStack() as stack:

        def begin(command: list[str], wanted: str, **environment: str) -> re.Match[str]:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            )  # fmt: skip
            assert process.stdout is not None
            found = next(found for line in process.stdout if (found := re.search(wanted, line)))
            reading = threading.Thread(target=process.stdout.read)
            reading.start()

            def end() -> None:
                process.terminate()
                process.wait(30)
                reading.join()
                process.stdout.close()

            stack.callback(end)
            return found

        yield begin


@pytest.fixture(scope="module")
def place(start: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.fail("no prometheus here: apt-get install prometheus")
    folder = tmp_path_factory.mktemp("scraped")
    server = [sys.executable, "-m", "mlx_provider.server"]
    own = {"MLX_PROVIDER_API_KEY": "secret", "MLX_PROVIDER_MODEL_ROOTS": str(folder.parent)}
    served = start([*server, "--port", "0"], r"engine on http://(\S+)", **own)[1]
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(served=served))
    port = free_port()
    scraper = [
        program, f"--config.file={config}", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    start(scraper, "Server is ready to receive web requests")
    engine = HttpClient(parse_address(f"http://{served}"), "secret")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
        yield Place(http, engine, f"http://{served}/metrics")
    engine.close()


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_prometheus_scrapes_an_engine(place: Place, tmp_path: Path) -> None:
    wait_until(lambda: place.number('up{job="served"}') == 1)
    assert place.number('mlx_provider_models_loaded{job="served"}') == 0
    folder = build(tmp_path / "tiny-qwen", "qwen3")
    for text in ("The same long beginning of a question. " * 4,) * 2:
        request = GenerateRequest(
            model=str(folder), messages=[{"role": "user", "content": text}], max_tokens=8
        )
        generation = place.engine.submit(request)
        while generation.get(60):
            pass
    wait_until(lambda: place.number('mlx_provider_models_loaded{job="served"}') == 1)
    hit = 'mlx_provider_prefix_lookup_tokens_total{job="served",outcome="hit"}'
    assert wait_until(lambda: place.number(hit)) > 50
    weights = 'mlx_provider_model_memory_bytes{model="tiny-qwen",owner="weights"}'
    assert (place.number(weights) or 0) > 1000


def test_the_dashboard_asks_what_it_understands(place: Place) -> None:
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            asked = target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
            place.ask(asked)


def test_promtool_has_nothing_to_say(place: Place) -> None:
    told = httpx.get(place.metrics, headers={"authorization": "Bearer secret"})
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=told.text, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
