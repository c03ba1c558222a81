"""Warm prompts: what the operator lists is prefilled before the first user asks for it."""

from __future__ import annotations

from pathlib import Path

from mlx_provider.chat.service import ChatService
from mlx_provider.client.in_process import InProcessClient
from mlx_provider.config import EngineSettings
from mlx_provider.protocol import Done, GenerateRequest, ModelOptions, Sampling
from mlx_provider.testing.tiny_models import build

SYSTEM = "You are a guide through the old town and you answer in short sentences. " * 3


def ask(client: InProcessClient, folder: Path, options: ModelOptions, text: str) -> Done:
    generation = client.submit(
        GenerateRequest(
            model=str(folder),
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
            max_tokens=2,
            sampling=Sampling(temperature=0),
            options=options,
        )
    )
    while events := generation.get(30):
        if isinstance(events[-1], Done):
            return events[-1]
    raise AssertionError("no end")


def first_answer(folder: Path, warm: list[str]) -> Done:
    """What the very first request to a new engine sees."""
    client = InProcessClient(ChatService(EngineSettings()))
    try:
        return ask(client, folder, ModelOptions(warm=warm), "Where is the tower?")
    finally:
        client.close()


def test_the_first_request_finds_the_warm_system_prompt(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "qwen3")
    assert first_answer(folder, []).usage.cached_tokens == 0
    usage = first_answer(folder, [SYSTEM]).usage
    assert usage.cached_tokens > usage.prompt_tokens // 2
