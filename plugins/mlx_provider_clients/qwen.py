"""Qwen Code (names as in the documents of its package 0.24.4)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_provider import Client, ClientServer, ClientSettings, Gateway, Profile

from .limits import KEY, REPLY_SECONDS
from .nested import count, mapping


def profile(gateway: Gateway) -> Profile:
    """One `settings.json` in its own home. Only a provider's entry can set the context."""
    model = {
        "id": gateway.model,
        "name": gateway.model,
        "envKey": KEY,
        "baseUrl": f"{gateway.url}/v1",
        "generationConfig": {
            "contextWindowSize": gateway.context,
            "timeout": REPLY_SECONDS * 1000,
            "streamIdleTimeoutMs": REPLY_SECONDS * 1000,
            "modalities": {"image": gateway.images},
            "samplingParams": {"max_tokens": gateway.output},
        },
    }
    settings = {
        "$version": 4,
        "modelProviders": {"openai": [model]},
        "model": {"name": gateway.model},
        "security": {"auth": {"selectedType": "openai"}},
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
    }
    return Profile(
        {
            "QWEN_HOME": str(gateway.folder),
            "QWEN_STREAM_MAX_LIFETIME_MS": "0",
            # Without these it would take the key of a project's `.env`.
            "OPENAI_API_KEY": gateway.key,
            "OPENAI_BASE_URL": f"{gateway.url}/v1",
            "OPENAI_MODEL": gateway.model,
            KEY: gateway.key,
        },
        files={"settings.json": json.dumps(settings, indent=2)},
        hidden=("OPENAI_*", "QWEN_*"),
    )


def servers(content: Mapping[str, Any]) -> Iterator[ClientServer]:
    named = mapping(content, "security", "auth").get("baseUrl")
    if url := named or mapping(content, "env").get("OPENAI_BASE_URL"):
        window = mapping(content, "model", "generationConfig").get("contextWindowSize")
        yield ClientServer(str(url), count(window))


CLIENT = Client(
    "qwen",
    command="qwen",
    install="npm install -g @qwen-code/qwen-code",
    profile=profile,
    prompt_bytes=76_000,
    aliases=("qwen-code",),
    serves="Qwen Code",
    settings=ClientSettings((), (".qwen/settings.json",), servers),
)
