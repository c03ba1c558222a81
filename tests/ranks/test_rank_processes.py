"""Real ranks under `mlx.launch`, over a scripted service: faults, restarts, the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_provider.config import Runtime

pytestmark = pytest.mark.ranks

LIMIT = 90.0
SUPERVISED = f"""
import sys
from mlx_provider_ranks import launching
launching.RANK_COMMAND = (sys.executable, "-P", {str(Path(__file__).parent / "fake_rank.py")!r})
from mlx_provider_ranks.__main__ import main
sys.exit(main(["--ranks", "2"]))
"""


@dataclass
class Serving:
    """A supervised group on a socket of its own."""

    folder: Path
    process: subprocess.Popen[str]
    told: list[str] = field(default_factory=list)

    def client(self) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(self.folder / "engine.sock"))
        return httpx.Client(transport=transport, base_url="http://engine", timeout=LIMIT)

    def health(self, other_than: int = 0) -> dict[str, Any]:
        """Once an engine answers that is not this process."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            try:
                if not Runtime(self.folder).listens():  # httpx leaves sockets open that find nobody
                    time.sleep(0.1)
                    continue
                with self.client() as client:
                    found: dict[str, Any] = client.get("/health").json()
                if found["pid"] != other_than:
                    return found
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError("no engine")

    def generate(self, prompt: str) -> None:
        body = {"id": f"r{len(self.told)}{prompt}", "model": "fake", "prompt": prompt}
        with self.client() as client, client.stream("POST", "/v1/generate", json=body) as reply:
            for line in reply.iter_lines():
                self.told.append(line)

    def in_flight(self) -> threading.Thread:
        self.told.clear()
        thread = threading.Thread(target=self.generate, args=("wait",))
        thread.start()
        deadline = time.monotonic() + LIMIT
        while not self.told and time.monotonic() < deadline:
            time.sleep(0.01)
        return thread


@pytest.fixture
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("r")
    environment = {**os.environ, "MLX_PROVIDER_RUNTIME_DIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISED], env=environment, stderr=subprocess.PIPE, text=True
    )
    yield Serving(folder, process)
    process.terminate()
    process.communicate(timeout=LIMIT)


def _is_gone(pid: int) -> bool:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "its process ended, or closed the connection"),
        (signal.SIGSTOP, "no beat for 4 s"),
    ],
)
def test_a_lost_rank(serving: Serving, number: signal.Signals, reason: str) -> None:
    """In flight: a typed error within 5 s. Then: the group again, nothing of the old one left."""
    before = serving.health()
    assert [each["state"] for each in before["processes"]] == ["serving", "serving"]
    assert "process_fault" not in before
    waits = serving.in_flight()
    at = time.monotonic()
    os.kill(before["processes"][1]["pid"], number)
    waits.join(LIMIT)
    assert time.monotonic() - at < 5
    assert '"code":"process_lost"' in serving.told[-1]
    assert reason in serving.told[-1]
    after = serving.health(other_than=before["pid"])
    assert after["process_fault"]["name"] == "rank 1"
    assert after["process_fault"]["detail"] == reason
    assert all(_is_gone(each["pid"]) for each in before["processes"])


def test_a_supervisor_that_is_killed_leaves_no_orphan(serving: Serving) -> None:
    ranks = serving.health()["processes"]
    serving.process.kill()
    assert all(_is_gone(each["pid"]) for each in ranks)


def test_the_end_in_order(serving: Serving) -> None:
    ranks = serving.health()["processes"]
    waits = serving.in_flight()
    serving.process.terminate()
    waits.join(LIMIT)
    assert '"type":"failed"' in serving.told[-1]
    assert serving.process.wait(LIMIT) == 0
    assert all(_is_gone(each["pid"]) for each in ranks)
    assert not (serving.folder / "engine.sock").exists()


def test_other_versions_end_it_by_name(tmp_path: Path) -> None:
    environment = {
        **os.environ, "MLX_PROVIDER_RUNTIME_DIR": str(tmp_path), "FAKE_RANK_MLX": "0.1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISED],
        env=environment, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ranks differ: mlx: 0.1 on rank 1" in done.stderr.splitlines()[-1]
    assert "restarts" not in done.stderr
