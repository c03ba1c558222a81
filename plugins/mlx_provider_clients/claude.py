"""Claude Code (names as in its binary 2.1.329)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_provider import Client, ClientServer, ClientSettings, Gateway, Profile

from .nested import REPLY_SECONDS, SUBAGENT, SUBAGENT_PROMPT, SUBAGENT_TASKS, mapping

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


def profile(gateway: Gateway) -> Profile:
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


def subagent(gateway: Gateway) -> Profile:
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


def servers(content: Mapping[str, Any]) -> Iterator[ClientServer]:
    variables = mapping(content, "env")
    window = str(variables.get("CLAUDE_CODE_AUTO_COMPACT_WINDOW", ""))
    if url := variables.get("ANTHROPIC_BASE_URL"):
        yield ClientServer(str(url), int(window) if window.isdigit() else None)


CLAUDE = Client(
    "claude",
    command="claude",
    install="npm install -g @anthropic-ai/claude-code",
    profile=profile,
    prompt_bytes=48_600,
    api="messages",
    subagent=subagent,
    forwards="anthropic/claude-*",
    aliases=("claude-code",),
    serves="Claude Code",
    settings=ClientSettings(
        ("ANTHROPIC_BASE_URL",),
        ("$CLAUDE_CONFIG_DIR/settings.json", ".claude/settings.json"),
        servers,
        window="CLAUDE_CODE_AUTO_COMPACT_WINDOW",
    ),
)
