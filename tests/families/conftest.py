"""Tiny vision models, built and loaded once."""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from equipped import equipped
from mlx_provider import LoadedModel, LoadOptions, MediaItem, ModelFamily, Prompt
from tiny import build

PLUGINS = {
    "qwen3_vl": "mlx_provider_qwen3_vl",
    "qwen3_vl_moe": "mlx_provider_qwen3_vl",
    "gemma3": "mlx_provider_gemma3",
    "qwen3_5": "mlx_provider_qwen3_5",
    "qwen3_5_moe": "mlx_provider_qwen3_5",
}
MEDIA_WORDS = {"image": {"type": "image"}, "video": {"type": "video"}}

Folders = Callable[[str], Path]
Load = Callable[[str], LoadedModel]
Ask = Callable[..., Prompt]


def family_of(plugin: str) -> ModelFamily:
    module = importlib.import_module(plugin)
    return next(iter(module.mlx_model_families()))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a tiny model by family name."""

    @cache
    def folder(name: str) -> Path:
        return build(tmp_path_factory.mktemp("tiny") / name, name)

    return folder


@pytest.fixture(scope="session")
def load(folders: Folders) -> Load:
    """A tiny model by family name, through its plugin."""

    @cache
    def loaded(name: str) -> LoadedModel:
        family = family_of(PLUGINS[name])
        config: Mapping[str, Any] = json.loads((folders(name) / "config.json").read_text())
        assert family.matches(config) == 10
        return equipped(family.load(folders(name), LoadOptions()))

    return loaded


@pytest.fixture(scope="session")
def ask() -> Ask:
    """A prompt of one user message: texts and media in order."""

    def prompt(model: LoadedModel, *parts: str | MediaItem, system: str = "") -> Prompt:
        media = [part for part in parts if isinstance(part, MediaItem)]
        content: Sequence[Any] = [
            MEDIA_WORDS[p.kind] if isinstance(p, MediaItem) else {"type": "text", "text": p}
            for p in parts
        ]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return model.prepare(messages, tools=[], media=media, variables={})

    return prompt
