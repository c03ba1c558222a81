"""Cline's CLI (names as in the types of its packages @cline/core and cline 3.0.65)."""

from __future__ import annotations

import json

from mlx_provider import Client, Gateway, Profile

from .limits import REPLY_SECONDS

PROVIDER = "openai-compatible"
SINCE = "2026-01-01T00:00:00.000Z"


def profile(gateway: Gateway) -> Profile:
    settings = {
        "provider": PROVIDER,
        "apiKey": gateway.key,
        "model": gateway.model,
        "baseUrl": f"{gateway.url}/v1",
        "maxTokens": gateway.output,
        "contextWindow": gateway.context,
        "timeout": REPLY_SECONDS * 1000,
    }
    entry = {"settings": settings, "updatedAt": SINCE, "tokenSource": "manual"}
    stored = {"version": 1, "lastUsedProvider": PROVIDER, "providers": {PROVIDER: entry}}
    path = gateway.folder / "settings" / "providers.json"
    return Profile(
        {
            "CLINE_DIR": str(gateway.folder),
            "CLINE_DATA_DIR": str(gateway.folder),
            "CLINE_PROVIDER_SETTINGS_PATH": str(path),
            "CLINE_NO_AUTO_UPDATE": "1",
        },
        files={"settings/providers.json": json.dumps(stored, indent=2)},
        hidden=("CLINE_*",),
    )


CLIENT = Client(
    "cline",
    command="cline",
    install="npm install -g cline",
    profile=profile,
    prompt_bytes=21_800,
    serves="Cline",
)
