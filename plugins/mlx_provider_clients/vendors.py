"""Claude Code (names as in its binary 2.1.329), Codex CLI (its binary 0.169.0) and Qwen Code (the
documents of its package 0.24.4)."""

from __future__ import annotations

import json

from mlx_provider import Client, Gateway, Profile

from .shared import KEY, PROVIDER, REPLY_SECONDS, SUBAGENT, SUBAGENT_PROMPT, SUBAGENT_TASKS

ROLES = ("OPUS", "SONNET", "HAIKU")
LEAST_WINDOW_TOKENS = 100_000
"""A smaller `CLAUDE_CODE_AUTO_COMPACT_WINDOW` counts as this."""
SUBAGENT_TOOLS = ("Read", "Grep", "Glob", "Edit", "Write", "Bash")
LIMITS = (
    "API_TIMEOUT_MS",
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS",
    "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS",
    "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS",
)
TEMPORARY = "tmp"


def _profile_claude(gateway: Gateway) -> Profile:
    """By variables. The files skip the questions of a first start, and deny the tool that
    Anthropic's servers would run."""
    environment = {
        "CLAUDE_CONFIG_DIR": str(gateway.folder),
        "ANTHROPIC_BASE_URL": gateway.url,
        "ANTHROPIC_AUTH_TOKEN": gateway.key,
        "ANTHROPIC_MODEL": gateway.model,
        **{f"ANTHROPIC_DEFAULT_{role}_MODEL": gateway.model for role in ROLES},
        "ANTHROPIC_SMALL_FAST_MODEL": gateway.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": gateway.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(gateway.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(gateway.output),
        # Otherwise each prompt begins with a line that differs from request to request.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **dict.fromkeys(LIMITS, str(REPLY_SECONDS * 1000)),
    }
    if gateway.context >= LEAST_WINDOW_TOKENS:
        environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(gateway.context)
    return Profile(
        environment,
        files={
            ".claude.json": json.dumps({"hasCompletedOnboarding": True}),
            "settings.json": json.dumps({"permissions": {"deny": ["WebSearch"]}}),
        },
        hidden=("ANTHROPIC_*", "CLAUDE_CODE_USE_*", "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDECODE"),
    )


def _subagent(gateway: Gateway) -> Profile:
    """The user's login stays in use: the gateway passes on the requests of the main model."""
    agent = {
        "description": SUBAGENT_TASKS,
        "prompt": SUBAGENT_PROMPT,
        "model": gateway.model,
        "tools": SUBAGENT_TOOLS,
    }
    return Profile(
        {
            "ANTHROPIC_BASE_URL": gateway.url,
            "ANTHROPIC_CUSTOM_HEADERS": f"x-litellm-api-key: Bearer {gateway.key}",
            **dict.fromkeys(LIMITS, str(REPLY_SECONDS * 1000)),
        },
        arguments=("--agents", json.dumps({SUBAGENT: agent})),
    )


CLAUDE = Client(
    "claude",
    command="claude",
    install="npm install -g @anthropic-ai/claude-code",
    profile=_profile_claude,
    prompt_bytes=48_600,
    api="messages",
    subagent=_subagent,
    forwards="anthropic/claude-*",
    aliases=("claude-code",),
    serves="Claude Code",
)


def _profile_codex(gateway: Gateway) -> Profile:
    settings = {
        "model": gateway.model,
        "model_provider": PROVIDER,
        "model_context_window": gateway.context,
        # The rest must be enough for the answer and for the request for a summary.
        "model_auto_compact_token_limit": gateway.context - gateway.output,
        "check_for_update_on_startup": False,
    }
    provider = {
        "name": "mlx-provider",
        "base_url": f"{gateway.url}/v1",
        "env_key": KEY,
        "wire_api": "responses",
        "stream_idle_timeout_ms": REPLY_SECONDS * 1000,
    }
    lines = [*_toml(settings), "[analytics]", "enabled = false"]
    lines += [f"[model_providers.{PROVIDER}]", *_toml(provider)]
    return Profile(
        {
            "CODEX_HOME": str(gateway.folder),
            # It makes its helpers (`apply_patch`) in no home below the folder for temporary files.
            "TMPDIR": str(gateway.folder / TEMPORARY),
            KEY: gateway.key,
        },
        files={"config.toml": "\n".join(lines) + "\n", f"{TEMPORARY}/.made": ""},
        hidden=("OPENAI_*", "CODEX_*"),
    )


def _toml(values: dict[str, object]) -> list[str]:
    """Texts, numbers and booleans are the same in JSON and TOML."""
    return [f"{name} = {json.dumps(value)}" for name, value in values.items()]


CODEX = Client(
    "codex",
    command="codex",
    install="npm install -g @openai/codex",
    profile=_profile_codex,
    prompt_bytes=39_500,
    api="responses",
    serves="Codex CLI",
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


QWEN = Client(
    "qwen",
    command="qwen",
    install="npm install -g @qwen-code/qwen-code",
    profile=_profile_qwen,
    prompt_bytes=76_000,
    aliases=("qwen-code",),
    serves="Qwen Code",
)
