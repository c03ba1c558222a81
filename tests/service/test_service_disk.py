"""The disk tier with a complete service: a new engine finds the prefixes of an earlier one."""

import stat
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from in_process import InProcessClient
from mlx_provider.protocol.events import Delta, Done, Usage
from mlx_provider.protocol.requests import GenerateRequest, Sampling
from mlx_provider.serving.service import ChatService
from mlx_provider.settings import EngineSettings
from tiny import build

MESSAGES = [
    {"role": "system", "content": "You are a guide through the old town. " * 40},
    {"role": "user", "content": "Where is the tower?"},
]


def serve_once(
    folder: Path, disk: Path, messages: Sequence[dict[str, str]] = MESSAGES
) -> tuple[str, Usage]:
    """The answer of a new engine to one request."""
    with closing(
        InProcessClient(ChatService(EngineSettings(disk_cache=disk, kv_layout="solo")))
    ) as client:
        generation = client.submit(
            GenerateRequest(
                model=str(folder),
                messages=list(messages),
                max_tokens=8,
                sampling=Sampling(temperature=0),
            )
        )
        text, usage = "", Usage(prompt_tokens=0, completion_tokens=0)
        while events := generation.get(300):
            text += "".join(e.content for e in events if isinstance(e, Delta))
            usage = next((e.usage for e in events if isinstance(e, Done)), usage)
        return text, usage


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_a_restart_keeps_the_prefixes(tmp_path: Path, family: str) -> None:
    folder, disk = build(tmp_path / "model", family), tmp_path / "disk"
    text, usage = serve_once(folder, disk)
    assert usage.cached_tokens == 0
    again, _ = serve_once(folder, disk)
    assert again == text
    turns = [*MESSAGES, {"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
    _, usage = serve_once(folder, disk, turns)
    assert usage.prompt_tokens - usage.cached_tokens < 0.05 * usage.prompt_tokens
    files = [p for p in disk.rglob("*") if p.is_file()]
    assert files
    assert {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o600}


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    serve_once(build(tmp_path / "one", "qwen3"), disk)
    assert serve_once(build(tmp_path / "two", "qwen3", seed=1), disk)[1].cached_tokens == 0
