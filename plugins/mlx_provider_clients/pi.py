"""pi (names as in the documents and the schema `core/model-config.js` of its package 0.87.1)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_provider import Client, ClientServer, ClientSettings, Gateway, Profile

from .limits import KEY
from .nested import each, least

PROVIDER = "mlx"
RECENT = 20_000
"""Tokens that a compaction keeps by default."""


def profile(gateway: Gateway) -> Profile:
    model = {
        "id": gateway.model,
        "contextWindow": gateway.context,
        "maxTokens": gateway.output,
        "input": ["text", "image"] if gateway.images else ["text"],
    }
    provider = {
        "baseUrl": f"{gateway.url}/v1",
        "api": "openai-completions",
        "apiKey": f"${KEY}",
        "models": [model],
    }
    settings = {
        "defaultProvider": PROVIDER,
        "defaultModel": gateway.model,
        "httpIdleTimeoutMs": 0,
        "compaction": {
            "reserveTokens": gateway.output,
            "keepRecentTokens": min(RECENT, gateway.context // 4),
        },
    }
    return Profile(
        {"PI_CODING_AGENT_DIR": str(gateway.folder), "PI_OFFLINE": "1", KEY: gateway.key},
        files={
            "models.json": json.dumps({"providers": {PROVIDER: provider}}, indent=2),
            "settings.json": json.dumps(settings, indent=2),
        },
        hidden=("PI_*",),
    )


def servers(content: Mapping[str, Any]) -> Iterator[ClientServer]:
    for provider in each(content.get("providers")):
        if url := provider.get("baseUrl"):
            windows = (model.get("contextWindow") for model in each(provider.get("models")))
            yield ClientServer(str(url), least(windows))


CLIENT = Client(
    "pi",
    command="pi",
    install="npm install -g @earendil-works/pi-coding-agent",
    profile=profile,
    prompt_bytes=5_700,
    serves="pi",
    settings=ClientSettings((), (".pi/agent/models.json",), servers),
)
