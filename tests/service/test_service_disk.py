"""The disk tier behind the whole service: an engine that starts anew finds old prefixes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from mlx_provider.client.in_process import InProcessClient
from mlx_provider.config import EngineSettings
from mlx_provider.protocol.events import Delta, Done
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.protocol.sampling import Sampling
from mlx_provider.serving.service import ChatService
from mlx_provider.testing.tiny import build

MESSAGES = [
    {"role": "system", "content": "You are a guide through the old town. " * 6},
    {"role": "user", "content": "Where is the tower?"},
]


def serve_once(folder: Path, disk: Path) -> tuple[str, int]:
    """The answer and the cached tokens of one request to a new engine."""
    client = InProcessClient(ChatService(EngineSettings(disk_cache=disk)))
    try:
        generation = client.submit(
            GenerateRequest(
                model=str(folder),
                messages=MESSAGES,
                max_tokens=8,
                sampling=Sampling(temperature=0),
            )
        )
        text, cached = "", -1
        while events := generation.get(300):
            text += "".join(e.content for e in events if isinstance(e, Delta))
            cached = next((e.usage.cached_tokens for e in events if isinstance(e, Done)), cached)
        return text, cached
    finally:
        client.close()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_a_restart_keeps_the_prefixes(tmp_path: Path, family: str) -> None:
    folder, disk = build(tmp_path / "model", family), tmp_path / "disk"
    text, cached = serve_once(folder, disk)
    assert cached == 0
    again, found = serve_once(folder, disk)
    assert again == text
    assert found > 40
    files = [p for p in disk.rglob("*") if p.is_file()]
    assert files
    assert {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o600}


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    serve_once(build(tmp_path / "one", "qwen3"), disk)
    assert serve_once(build(tmp_path / "two", "qwen3", seed=1), disk)[1] == 0
