"""Warm prompts: prompts that the operator lists are prefilled before the first request."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from in_process import InProcessClient
from mlx_provider.protocol.events import Done
from mlx_provider.protocol.requests import GenerateRequest, ModelOptions
from mlx_provider.serving.service import ChatService
from mlx_provider.serving.weights import WARMED
from mlx_provider.settings import EngineSettings
from tiny import build

SYSTEM = "You are a guide through the old town and you answer in short sentences. " * 3


def serve(**settings: Any) -> closing[ChatService]:
    return closing(ChatService(EngineSettings(kv_layout="solo", **settings)))


def reused_share(service: ChatService, folder: Path, text: str, **more: Any) -> float:
    """The share of a prompt with the system prompt that is found in the prefix cache."""
    request = GenerateRequest(
        model=str(folder),
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
        max_tokens=2,
        **more,
    )
    generation = InProcessClient(service).submit(request)
    while events := generation.get(300):
        if isinstance(events[-1], Done):
            return events[-1].usage.cached_tokens / events[-1].usage.prompt_tokens
    raise AssertionError("no end")


@pytest.mark.parametrize("warm", [[], [SYSTEM]])
def test_the_first_request_reuses_the_warm_system_prompt(tmp_path: Path, warm: list[str]) -> None:
    with serve() as service:
        folder = build(tmp_path / "model", "qwen3")
        options = ModelOptions(warm=warm)
        share = reused_share(service, folder, "Where is the tower?", options=options)
        assert share > 0.5 if warm else share == 0


def test_each_tenant_reuses_its_own_warm_prompt(tmp_path: Path) -> None:
    """Prefixes are never shared, so a warm one helps nobody else."""
    folder = build(tmp_path / "model", "qwen3")
    options = ModelOptions(warm=[SYSTEM])
    with serve() as service:
        assert reused_share(service, folder, "Hi", salt="b") == 0
        for tenant in ("a", "b"):
            assert reused_share(service, folder, f"{tenant}?", salt=tenant, options=options) > 0.5
        (served,) = service.models.views()
        for number in range(WARMED):
            served.to_warm(f"tenant {number}", [SYSTEM])
        assert served.to_warm("a", [SYSTEM])
        assert not served.to_warm("a", [SYSTEM])


def test_warm_prompts_in_the_owners_file_serve_other_machines(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "qwen3")
    file = tmp_path / "models.toml"
    file.write_text(f'["{folder}"]\nallow_media = ["private"]\nwarm = ["""{SYSTEM}"""]\n', "utf-8")
    with serve(models_file=file) as service:
        assert reused_share(service, folder, "Where?", origin="remote") > 0.5


def test_warm_prompts_have_the_bounds_of_others() -> None:
    for wrong in (["x"] * 65, [{"messages": [{"role": "user", "content": "\ud800"}]}]):
        with pytest.raises(ValidationError):
            ModelOptions(warm=wrong)
