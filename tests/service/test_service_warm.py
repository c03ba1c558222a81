"""Warm prompts: prompts that the operator lists are prefilled before the first request."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from in_process import InProcessClient
from mlx_provider.protocol.events import Done
from mlx_provider.protocol.requests import GenerateRequest, ModelOptions, Sampling
from mlx_provider.serving.service import ChatService
from mlx_provider.serving.weights import WARMED
from mlx_provider.settings import EngineSettings
from tiny import build

SYSTEM = "You are a guide through the old town and you answer in short sentences. " * 3


def ask(
    client: InProcessClient, folder: Path, options: ModelOptions, text: str, **more: Any
) -> Done:
    generation = client.submit(
        GenerateRequest(
            model=str(folder),
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
            max_tokens=2,
            sampling=Sampling(temperature=0),
            options=options,
            **more,
        )
    )
    while events := generation.get(300):
        if isinstance(events[-1], Done):
            return events[-1]
    raise AssertionError("no end")


def first_answer(folder: Path, warm: list[str]) -> Done:
    """The reply to the first request to a new engine."""
    with closing(InProcessClient(ChatService(EngineSettings(kv_layout="solo")))) as client:
        return ask(client, folder, ModelOptions(warm=warm), "Where is the tower?")


def test_the_first_request_reuses_the_warm_system_prompt(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "qwen3")
    assert first_answer(folder, []).usage.cached_tokens == 0
    usage = first_answer(folder, [SYSTEM]).usage
    assert usage.cached_tokens > usage.prompt_tokens // 2


def test_each_tenant_reuses_its_own_warm_prompt(tmp_path: Path) -> None:
    """Prefixes are never shared, so a warm one helps nobody else."""
    folder = build(tmp_path / "model", "qwen3")
    warm = ModelOptions(warm=[SYSTEM])
    with closing(InProcessClient(ChatService(EngineSettings(kv_layout="solo")))) as client:
        assert ask(client, folder, ModelOptions(), "Hi", salt="b").usage.cached_tokens == 0
        for tenant in ("a", "b"):
            usage = ask(client, folder, warm, f"Where is {tenant}?", salt=tenant).usage
            assert usage.cached_tokens > usage.prompt_tokens // 2, tenant
        (served,) = client.service.models.views()  # type: ignore[attr-defined]
        for number in range(WARMED):
            served.to_warm(f"tenant {number}", [SYSTEM])
        assert served.to_warm("a", [SYSTEM])
        assert not served.to_warm("a", [SYSTEM])


def test_warm_prompts_in_the_owners_file_serve_other_machines(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "qwen3")
    file = tmp_path / "models.toml"
    file.write_text(f'["{folder}"]\nallow_media = ["private"]\nwarm = ["""{SYSTEM}"""]\n', "utf-8")
    with closing(
        InProcessClient(ChatService(EngineSettings(models_file=file, kv_layout="solo")))
    ) as client:
        usage = ask(client, folder, ModelOptions(), "Where?", origin="remote").usage
        assert usage.cached_tokens > usage.prompt_tokens // 2


def test_warm_prompts_have_the_bounds_of_others() -> None:
    for wrong in (["x"] * 65, [{"messages": [{"role": "user", "content": "\ud800"}]}]):
        with pytest.raises(ValidationError):
            ModelOptions(warm=wrong)
