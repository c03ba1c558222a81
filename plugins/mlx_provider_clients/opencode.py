"""OpenCode (names as in its binary 1.18.33 and in https://opencode.ai/config.json).

Kilo Code's CLI, a fork of OpenCode (names as in its binary 7.7.7).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_provider import Client, ClientServer, ClientSettings, Gateway, Profile

from .nested import KEY, SUBAGENT, SUBAGENT_PROMPT, SUBAGENT_TASKS, each, least, mapping

PROVIDER = "mlx"
FOLDERS = ("CONFIG", "DATA", "STATE", "CACHE")


def folders(gateway: Gateway) -> dict[str, str]:
    """The base folders of a program whose own folders cannot be set otherwise. npm, which installs
    its plugins, has another cache."""
    cache = {"npm_config_cache": str(gateway.folder / "npm")}
    return cache | {f"XDG_{name}_HOME": str(gateway.folder / name.lower()) for name in FOLDERS}


def _provider(gateway: Gateway) -> dict[str, Any]:
    model = {
        "name": gateway.model,
        "limit": {"context": gateway.context, "output": gateway.output},
        "attachment": gateway.images,
        "modalities": {
            "input": ["text", "image"] if gateway.images else ["text"],
            "output": ["text"],
        },
        "tool_call": True,
    }
    return {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlx-provider",
        # A request that is cut off after five minutes would be sent again.
        "options": {"baseURL": f"{gateway.url}/v1", "apiKey": f"{{env:{KEY}}}", "timeout": False},
        "models": {gateway.model: model},
    }


def config(gateway: Gateway) -> str:
    """Shared by forks of OpenCode."""
    chosen = f"{PROVIDER}/{gateway.model}"
    return json.dumps(
        {
            "$schema": "https://opencode.ai/config.json",
            "provider": {PROVIDER: _provider(gateway)},
            "enabled_providers": [PROVIDER],
            "model": chosen,
            "small_model": chosen,
            "share": "disabled",
            "autoupdate": False,
        },
        indent=2,
    )


def _profile_opencode(gateway: Gateway) -> Profile:
    """A file that is read in addition to the project's."""
    return Profile(
        {
            **folders(gateway),
            "OPENCODE_CONFIG": str(gateway.folder / "opencode.json"),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            KEY: gateway.key,
        },
        files={"opencode.json": config(gateway)},
        hidden=("OPENCODE_*",),
    )


def subagent(gateway: Gateway) -> Profile:
    """Merged with all of the user's own settings."""
    agent = {
        "mode": "subagent",
        "description": SUBAGENT_TASKS,
        "prompt": SUBAGENT_PROMPT,
        "model": f"{PROVIDER}/{gateway.model}",
    }
    content = {"provider": {PROVIDER: _provider(gateway)}, "agent": {SUBAGENT: agent}}
    return Profile({"OPENCODE_CONFIG_CONTENT": json.dumps(content), KEY: gateway.key})


def servers(content: Mapping[str, Any]) -> Iterator[ClientServer]:
    for provider in each(content.get("provider")):
        if url := mapping(provider, "options").get("baseURL"):
            limits = [mapping(model, "limit") for model in each(provider.get("models"))]
            yield ClientServer(str(url), least(limit.get("context") for limit in limits))


OPENCODE = Client(
    "opencode",
    command="opencode",
    install="npm install -g opencode-ai",
    profile=_profile_opencode,
    prompt_bytes=30_700,
    serves="OpenCode",
    subagent=subagent,
    settings=ClientSettings(
        (),
        ("$XDG_CONFIG_HOME/opencode/opencode.json", ".config/opencode/opencode.json"),
        servers,
    ),
)


def _profile_kilo(gateway: Gateway) -> Profile:
    return Profile(
        {
            **folders(gateway),
            "KILO_CONFIG": str(gateway.folder / "kilo.json"),
            "KILO_DISABLE_AUTOUPDATE": "1",
            "KILO_DISABLE_MODELS_FETCH": "1",
            "KILO_DISABLE_SESSION_INGEST": "1",
            "KILO_TELEMETRY_LEVEL": "off",
            "KILO_NO_DAEMON": "1",
            KEY: gateway.key,
        },
        files={"kilo.json": config(gateway)},
        hidden=("KILO_*",),
    )


KILO = Client(
    "kilo",
    command="kilo",
    install="npm install -g @kilocode/cli",
    profile=_profile_kilo,
    prompt_bytes=50_000,
    aliases=("kilocode",),
    serves="Kilo Code",
)
