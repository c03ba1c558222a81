"""OpenCode (names as in its binary 1.18.33 and in https://opencode.ai/config.json), its fork Kilo
Code (its binary 7.7.7), Cline (the types of its packages @cline/core and cline 3.0.65), Continue
(the sources of its package 1.5.47), aider (its sources 0.86.2) and pi (the documents and the schema
`core/model-config.js` of its package 0.87.1)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_provider import Client, Gateway, Profile

from .shared import KEY, PROVIDER, REPLY_SECONDS, SUBAGENT, SUBAGENT_PROMPT, SUBAGENT_TASKS

FOLDERS = ("CONFIG", "DATA", "STATE", "CACHE")
CLINE_PROVIDER = "openai-compatible"
SINCE = "2026-01-01T00:00:00.000Z"
HISTORIES = ("INPUT_HISTORY_FILE", "CHAT_HISTORY_FILE")
RECENT = 20_000
"""Tokens that a compaction keeps by default."""


def _folders(gateway: Gateway) -> dict[str, str]:
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


def _config(gateway: Gateway) -> str:
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
            **_folders(gateway),
            "OPENCODE_CONFIG": str(gateway.folder / "opencode.json"),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            KEY: gateway.key,
        },
        files={"opencode.json": _config(gateway)},
        hidden=("OPENCODE_*",),
    )


def _subagent(gateway: Gateway) -> Profile:
    """Merged with all of the user's own settings."""
    agent = {
        "mode": "subagent",
        "description": SUBAGENT_TASKS,
        "prompt": SUBAGENT_PROMPT,
        "model": f"{PROVIDER}/{gateway.model}",
    }
    content = {"provider": {PROVIDER: _provider(gateway)}, "agent": {SUBAGENT: agent}}
    return Profile({"OPENCODE_CONFIG_CONTENT": json.dumps(content), KEY: gateway.key})


OPENCODE = Client(
    "opencode",
    command="opencode",
    install="npm install -g opencode-ai",
    profile=_profile_opencode,
    prompt_bytes=30_700,
    serves="OpenCode",
    subagent=_subagent,
)


def _profile_kilo(gateway: Gateway) -> Profile:
    return Profile(
        {
            **_folders(gateway),
            "KILO_CONFIG": str(gateway.folder / "kilo.json"),
            "KILO_DISABLE_AUTOUPDATE": "1",
            "KILO_DISABLE_MODELS_FETCH": "1",
            "KILO_DISABLE_SESSION_INGEST": "1",
            "KILO_TELEMETRY_LEVEL": "off",
            "KILO_NO_DAEMON": "1",
            KEY: gateway.key,
        },
        files={"kilo.json": _config(gateway)},
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


def _profile_cline(gateway: Gateway) -> Profile:
    settings = {
        "provider": CLINE_PROVIDER,
        "apiKey": gateway.key,
        "model": gateway.model,
        "baseUrl": f"{gateway.url}/v1",
        "maxTokens": gateway.output,
        "contextWindow": gateway.context,
        "timeout": REPLY_SECONDS * 1000,
    }
    entry = {"settings": settings, "updatedAt": SINCE, "tokenSource": "manual"}
    stored = {
        "version": 1,
        "lastUsedProvider": CLINE_PROVIDER,
        "providers": {CLINE_PROVIDER: entry},
    }
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


CONTINUE = Client(
    "continue",
    command="cn",
    install="npm install -g @continuedev/cli",
    profile=_profile_continue,
    prompt_bytes=7_500,
    aliases=("cn",),
    serves="Continue",
)


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


AIDER = Client(
    "aider",
    command="aider",
    install="pip install aider-chat",
    profile=_profile_aider,
    prompt_bytes=2_800,
    serves="aider",
)


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


PI = Client(
    "pi",
    command="pi",
    install="npm install -g @earendil-works/pi-coding-agent",
    profile=_profile_pi,
    prompt_bytes=5_700,
    serves="pi",
)
