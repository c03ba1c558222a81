"""aider (names as in its sources 0.86.2).

pi (names as in the documents and the schema `core/model-config.js` of its package 0.87.1).

Qwen Code (names as in the documents of its package 0.24.4).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_provider import Client, ClientServer, ClientSettings, Gateway, Profile

from .nested import KEY, REPLY_SECONDS, count, each, least, mapping

HISTORIES = ("INPUT_HISTORY_FILE", "CHAT_HISTORY_FILE")


def _profile_aider(gateway: Gateway) -> Profile:
    """By variables; no file is written beside the project's. Its folder is always `~/.aider`, so it
    gets another home; git still finds the user's."""
    model = f"openai/{gateway.model}"
    metadata = {
        "max_tokens": gateway.output,
        "max_input_tokens": gateway.context - gateway.output,
        "max_output_tokens": gateway.output,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
        "supports_vision": gateway.images,
    }
    return Profile(
        {
            "HOME": str(gateway.folder),
            "GIT_CONFIG_GLOBAL": str(git_config(Path.home())),
            "OPENAI_API_BASE": f"{gateway.url}/v1",
            "OPENAI_API_KEY": gateway.key,
            "AIDER_MODEL": model,
            "AIDER_WEAK_MODEL": model,
            "AIDER_MODEL_METADATA_FILE": str(gateway.folder / "models.json"),
            **{f"AIDER_{name}": str(gateway.folder / name.lower()) for name in HISTORIES},
            "AIDER_ANALYTICS": "false",
            "AIDER_CHECK_UPDATE": "false",
            "AIDER_SHOW_RELEASE_NOTES": "false",
            "AIDER_SHOW_MODEL_WARNINGS": "false",
            "AIDER_GITIGNORE": "false",
            "AIDER_TIMEOUT": str(REPLY_SECONDS),
        },
        files={"models.json": json.dumps({model: metadata}, indent=2)},
        hidden=("OPENAI_*", "AIDER_*"),
    )


def git_config(home: Path) -> Path:
    """The file that git reads for a user, one of two."""
    own, base = home / ".gitconfig", home / ".config" / "git" / "config"
    return base if base.is_file() and not own.is_file() else own


def servers(content: Mapping[str, Any]) -> Iterator[ClientServer]:
    if url := content.get("openai-api-base"):
        yield ClientServer(str(url))


AIDER = Client(
    "aider",
    command="aider",
    install="pip install aider-chat",
    profile=_profile_aider,
    prompt_bytes=2_800,
    serves="aider",
    settings=ClientSettings((), (".aider.conf.yml",), servers),
)


PROVIDER = "mlx"
RECENT = 20_000
"""Tokens that a compaction keeps by default."""


def _profile_pi(gateway: Gateway) -> Profile:
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


def _servers_pi(content: Mapping[str, Any]) -> Iterator[ClientServer]:
    for provider in each(content.get("providers")):
        if url := provider.get("baseUrl"):
            windows = (model.get("contextWindow") for model in each(provider.get("models")))
            yield ClientServer(str(url), least(windows))


PI = Client(
    "pi",
    command="pi",
    install="npm install -g @earendil-works/pi-coding-agent",
    profile=_profile_pi,
    prompt_bytes=5_700,
    serves="pi",
    settings=ClientSettings((), (".pi/agent/models.json",), _servers_pi),
)


def _profile_qwen(gateway: Gateway) -> Profile:
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


def _servers_qwen(content: Mapping[str, Any]) -> Iterator[ClientServer]:
    named = mapping(content, "security", "auth").get("baseUrl")
    if url := named or mapping(content, "env").get("OPENAI_BASE_URL"):
        window = mapping(content, "model", "generationConfig").get("contextWindowSize")
        yield ClientServer(str(url), count(window))


QWEN = Client(
    "qwen",
    command="qwen",
    install="npm install -g @qwen-code/qwen-code",
    profile=_profile_qwen,
    prompt_bytes=76_000,
    aliases=("qwen-code",),
    serves="Qwen Code",
    settings=ClientSettings((), (".qwen/settings.json",), _servers_qwen),
)
