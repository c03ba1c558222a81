"""Coding agents: how each is told of a gateway, works without its user, and runs a command.

A client gets an empty home of its own. Whatever it is told stands in its environment, in files of
that home, or on its command line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from installed import Installed

from mlx_provider.testing.scripted import Call

CODEX_UNASKED = "--dangerously-bypass-approvals-and-sandbox"


@dataclass(frozen=True)
class Place:
    """What a client is told of the gateway that it talks to."""

    home: Path
    url: str
    key: str
    model: str
    context: int


@dataclass(frozen=True)
class Profile:
    """What a client is told it by. Paths of files are those below its home."""

    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    """Stand before those that make it work alone."""


@dataclass(frozen=True)
class Client:
    """One coding agent."""

    name: str
    package: str
    program: Callable[[Installed], tuple[str, ...]]
    profile: Callable[[Place], Profile]
    alone: Callable[[str], tuple[str, ...]]
    """Arguments by which it answers a prompt without its user, asks nobody, and ends."""
    shell: Callable[[str], Call] | None
    """The call by which it runs a command; `None`: it has no tools."""

    def command(self, installed: Installed, profile: Profile, prompt: str) -> tuple[str, ...]:
        """The whole command line."""
        return (*self.program(installed), *profile.arguments, *self.alone(prompt))


def _native(pattern: str) -> Callable[[Installed], tuple[str, ...]]:
    return lambda installed: (str(installed.native(pattern)),)


def _node(file: str) -> Callable[[Installed], tuple[str, ...]]:
    return lambda installed: (str(installed.node / "node"), str(installed.modules / file))


def _claude(place: Place) -> Profile:
    return Profile(
        {
            "ANTHROPIC_BASE_URL": place.url,
            "ANTHROPIC_AUTH_TOKEN": place.key,
            "ANTHROPIC_MODEL": place.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": place.model,
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(place.context),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )


def _codex(place: Place) -> Profile:
    config = f"""\
model = "{place.model}"
model_provider = "litellm"
model_context_window = {place.context}
[model_providers.litellm]
name = "litellm"
base_url = "{place.url}/v1"
env_key = "LITELLM_KEY"
wire_api = "responses"
"""
    return Profile({"LITELLM_KEY": place.key}, {".codex/config.toml": config})


def _opencode_config(place: Place) -> str:
    limit = {"context": place.context, "output": 4096}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": place.key},
        "models": {place.model: {"tool_call": True, "limit": limit}},
    }
    model = f"litellm/{place.model}"
    return json.dumps({"permission": "allow", "model": model, "provider": {"litellm": provider}})


def _opencode(place: Place) -> Profile:
    return Profile(
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {".config/opencode/opencode.json": _opencode_config(place)},
    )


def _kilo(place: Place) -> Profile:
    return Profile(
        {"KILO_DISABLE_AUTOUPDATE": "1", "KILO_DISABLE_MODELS_FETCH": "1"},
        {".config/kilo/kilo.json": _opencode_config(place)},
    )


def _qwen(place: Place) -> Profile:
    return Profile(
        {
            "OPENAI_BASE_URL": f"{place.url}/v1",
            "OPENAI_API_KEY": place.key,
            "OPENAI_MODEL": place.model,
        },
        arguments=("--auth-type", "openai"),
    )


def _pi(place: Place) -> Profile:
    provider = {
        "baseUrl": f"{place.url}/v1",
        "apiKey": place.key,
        "api": "openai-completions",
        "models": [{"id": place.model, "contextWindow": place.context, "maxTokens": 4096}],
    }
    # by default it keeps 20,000 tokens as they are and reserves 16,384
    compaction = {"reserveTokens": 4096, "keepRecentTokens": min(20_000, place.context // 4)}
    return Profile(
        {"PI_OFFLINE": "1"},
        {
            ".pi/agent/models.json": json.dumps({"providers": {"litellm": provider}}),
            ".pi/agent/settings.json": json.dumps({"compaction": compaction}),
        },
        ("--provider", "litellm", "--model", place.model),
    )


def _continue(place: Place) -> Profile:
    model = {
        "name": place.model,
        "provider": "openai",
        "model": place.model,
        "apiBase": f"{place.url}/v1",
        "apiKey": place.key,
        "roles": ["chat"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": place.context, "maxTokens": 4096},
    }
    config = {"name": "local", "version": "1.0.0", "schema": "v1", "models": [model]}
    file = ".continue/config.yaml"
    return Profile(
        {"CONTINUE_TELEMETRY_ENABLED": "0"},
        {file: json.dumps(config)},
        ("--config", str(place.home / file)),
    )


def _cline(place: Place) -> Profile:
    provider = "openai-compatible"
    settings = {
        "provider": provider,
        "apiKey": place.key,
        "baseUrl": f"{place.url}/v1",
        "model": place.model,
        "contextWindow": place.context,
    }
    written = {"updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    known = {provider: {"settings": settings, **written}}
    file = {"version": 1, "lastUsedProvider": provider, "providers": known}
    return Profile(
        files={".cline/data/settings/providers.json": json.dumps(file)},
        arguments=("-P", provider, "-m", place.model),
    )


def _aider(place: Place) -> Profile:
    context = {"max_input_tokens": place.context, "max_output_tokens": 4096}
    known = {f"openai/{place.model}": {**context, "litellm_provider": "openai", "mode": "chat"}}
    return Profile(
        {"OPENAI_API_BASE": f"{place.url}/v1", "OPENAI_API_KEY": place.key},
        {".aider.model.metadata.json": json.dumps(known)},
        ("--model", f"openai/{place.model}", "--no-check-update", "--analytics-disable"),
    )


def _described(name: str) -> Callable[[str], Call]:
    return lambda line: Call(name, {"command": line, "description": "Runs it"})


CLIENTS = (
    Client(
        "Claude Code",
        "@anthropic-ai/claude-code",
        _native("@anthropic-ai/claude-code-*/claude"),
        _claude,
        lambda prompt: ("-p", prompt, "--allowedTools", "Bash"),
        _described("Bash"),
    ),
    Client(
        "Codex",
        "@openai/codex",
        _native("@openai/codex-*/vendor/*/bin/codex"),
        _codex,
        lambda prompt: ("exec", "--skip-git-repo-check", CODEX_UNASKED, prompt),
        lambda line: Call("exec_command", {"cmd": line}),
    ),
    Client(
        "OpenCode",
        "opencode-ai",
        _native("opencode-*/bin/opencode"),
        _opencode,
        lambda prompt: ("run", prompt),
        _described("bash"),
    ),
    Client(
        "Qwen Code",
        "@qwen-code/qwen-code",
        _node("@qwen-code/qwen-code/cli-entry.js"),
        _qwen,
        lambda prompt: ("-y", "-p", prompt),
        lambda line: Call("run_shell_command", {"command": line, "is_background": False}),
    ),
    Client(
        "pi",
        "@earendil-works/pi-coding-agent",
        _node("@earendil-works/pi-coding-agent/dist/bundle/cli.js"),
        _pi,
        lambda prompt: ("-p", prompt),
        lambda line: Call("bash", {"command": line}),
    ),
    Client(
        "Continue",
        "@continuedev/cli",
        _node("@continuedev/cli/dist/cn.js"),
        _continue,
        lambda prompt: ("--auto", "-p", prompt),
        lambda line: Call("Bash", {"command": line}),
    ),
    Client(
        "Kilo Code",
        "@kilocode/cli",
        _native("@kilocode/cli-*/bin/kilo"),
        _kilo,
        lambda prompt: ("run", "--auto", prompt),
        _described("bash"),
    ),
    Client(
        "Cline",
        "cline",
        _native("@cline/cli-*/bin/cline"),
        _cline,
        lambda prompt: ("--json", prompt),
        lambda line: Call("run_commands", {"commands": [line]}),
    ),
    Client(
        "aider",
        "aider-chat",
        lambda installed: (str(installed.python("aider").with_name("aider")),),
        _aider,
        lambda prompt: ("--no-git", "--yes-always", "--message", prompt),
        None,
    ),
)
"""The scenarios of each are the rows of `CLIENTS.md`."""
