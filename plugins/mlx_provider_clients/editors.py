"""Cline's CLI (names as in the types of its packages @cline/core and cline 3.0.65).

Continue's CLI (names as in the sources of its package 1.5.47).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_provider import Client, ClientServer, ClientSettings, Gateway, Profile

from .nested import KEY, REPLY_SECONDS, count, each, mapping

PROVIDER = "openai-compatible"
SINCE = "2026-01-01T00:00:00.000Z"


def _profile_cline(gateway: Gateway) -> Profile:
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


CLINE = Client(
    "cline",
    command="cline",
    install="npm install -g cline",
    profile=_profile_cline,
    prompt_bytes=21_800,
    serves="Cline",
)


def _profile_continue(gateway: Gateway) -> Profile:
    """A `config.yaml` (JSON is YAML), and a separate home folder."""
    model = {
        "name": gateway.model,
        "provider": "openai",
        "model": gateway.model,
        "apiBase": f"{gateway.url}/v1",
        "apiKey": f"${{{{ secrets.{KEY} }}}}",
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use", *(["image_input"] if gateway.images else [])],
        "defaultCompletionOptions": {
            "contextLength": gateway.context,
            "maxTokens": gateway.output,
        },
        "requestOptions": {"timeout": REPLY_SECONDS * 1000},
    }
    config = {"name": "mlx-provider", "version": "1.0.0", "schema": "v1", "models": [model]}
    path = gateway.folder / "config.yaml"
    return Profile(
        {
            "CONTINUE_GLOBAL_DIR": str(gateway.folder),
            "CONTINUE_METRICS_ENABLED": "0",
            KEY: gateway.key,
        },
        files={"config.yaml": json.dumps(config, indent=2), ".onboarding_complete": ""},
        arguments=("--config", str(path)),
        hidden=("CONTINUE_*",),
    )


def servers(content: Mapping[str, Any]) -> Iterator[ClientServer]:
    for model in each(content.get("models")):
        if url := model.get("apiBase"):
            options = mapping(model, "defaultCompletionOptions")
            yield ClientServer(
                str(url), count(options.get("contextLength") or model.get("contextLength"))
            )


CONTINUE = Client(
    "continue",
    command="cn",
    install="npm install -g @continuedev/cli",
    profile=_profile_continue,
    prompt_bytes=7_500,
    aliases=("cn",),
    serves="Continue",
    settings=ClientSettings((), (".continue/config.yaml",), servers),
)
