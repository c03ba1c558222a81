"""Coding agents: how each is started without its user, and the tool by which it runs a command.

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


@dataclass(frozen=True)
class Place:
    """Where a client runs, and what it talks to."""

    installed: Installed
    home: Path
    url: str
    key: str
    model: str
    context: int
    prompt: str


@dataclass(frozen=True)
class Launch:
    """How a client starts. Paths of files are those below its home."""

    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Client:
    """One coding agent."""

    name: str
    package: str
    launch: Callable[[Place], Launch]
    shell: Callable[[str], Call] | None
    """The call by which it runs a command; `None`: it has no tools."""


def _claude(place: Place) -> Launch:
    program = place.installed.native("@anthropic-ai/claude-code-*/claude")
    options = ("--model", place.model, "--allowedTools", "Bash", "--output-format", "json")
    return Launch(
        (str(program), "-p", place.prompt, *options),
        {
            "ANTHROPIC_BASE_URL": place.url,
            "ANTHROPIC_AUTH_TOKEN": place.key,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": place.model,
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(place.context),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )


def _codex(place: Place) -> Launch:
    program = place.installed.native("@openai/codex-*/vendor/*/bin/codex")
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
    unattended = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return Launch(
        (str(program), "exec", *unattended, place.prompt),
        {"LITELLM_KEY": place.key},
        {".codex/config.toml": config},
    )


def _opencode_config(place: Place) -> str:
    limit = {"context": place.context, "output": 4096}
    return json.dumps(
        {
            "permission": "allow",
            "provider": {
                "litellm": {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": f"{place.url}/v1", "apiKey": place.key},
                    "models": {place.model: {"tool_call": True, "limit": limit}},
                }
            },
        }
    )


def _opencode(place: Place) -> Launch:
    program = place.installed.native("opencode-*/bin/opencode")
    return Launch(
        (str(program), "run", "-m", f"litellm/{place.model}", place.prompt),
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {".config/opencode/opencode.json": _opencode_config(place)},
    )


def _kilo(place: Place) -> Launch:
    program = place.installed.native("@kilocode/cli-*/bin/kilo")
    return Launch(
        (str(program), "run", "--auto", "-m", f"litellm/{place.model}", place.prompt),
        {"KILO_DISABLE_AUTOUPDATE": "1", "KILO_DISABLE_MODELS_FETCH": "1"},
        {".config/kilo/kilo.json": _opencode_config(place)},
    )


def _qwen(place: Place) -> Launch:
    program = place.installed.modules / "@qwen-code/qwen-code/cli-entry.js"
    options = ("--auth-type", "openai", "-y", "-p", place.prompt)
    return Launch(
        (str(place.installed.node / "node"), str(program), *options),
        {
            "OPENAI_BASE_URL": f"{place.url}/v1",
            "OPENAI_API_KEY": place.key,
            "OPENAI_MODEL": place.model,
        },
    )


def _pi(place: Place) -> Launch:
    program = place.installed.modules / "@earendil-works/pi-coding-agent/dist/bundle/cli.js"
    model = {"id": place.model, "contextWindow": place.context, "maxTokens": 4096}
    provider = {
        "baseUrl": f"{place.url}/v1",
        "apiKey": place.key,
        "api": "openai-completions",
        "models": [model],
    }
    options = ("--provider", "litellm", "--model", place.model, "-p", place.prompt)
    return Launch(
        (str(place.installed.node / "node"), str(program), *options),
        {"PI_OFFLINE": "1"},
        {".pi/agent/models.json": json.dumps({"providers": {"litellm": provider}})},
    )


def _continue(place: Place) -> Launch:
    program = place.installed.modules / "@continuedev/cli/dist/cn.js"
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
    options = ("--config", str(place.home / file), "--auto", "-p", place.prompt)
    return Launch(
        (str(place.installed.node / "node"), str(program), *options),
        {"CONTINUE_TELEMETRY_ENABLED": "0"},
        {file: json.dumps(config)},
    )


def _cline(place: Place) -> Launch:
    program = place.installed.native("@cline/cli-*/bin/cline")
    settings = {
        "provider": "openai-compatible",
        "apiKey": place.key,
        "baseUrl": f"{place.url}/v1",
        "model": place.model,
    }
    known = {
        "openai-compatible": {
            "settings": settings,
            "updatedAt": "2026-01-01T00:00:00.000Z",
            "tokenSource": "manual",
        }
    }
    providers = {"version": 1, "lastUsedProvider": "openai-compatible", "providers": known}
    options = ("-P", "openai-compatible", "-m", place.model, "--json", place.prompt)
    return Launch(
        (str(program), *options), {}, {".cline/data/settings/providers.json": json.dumps(providers)}
    )


def _aider(place: Place) -> Launch:
    python = place.installed.python("aider")
    quiet = ("--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings")
    context = {"max_input_tokens": place.context, "max_output_tokens": 4096}
    known = {f"openai/{place.model}": {**context, "litellm_provider": "openai", "mode": "chat"}}
    return Launch(
        (
            *(str(python.with_name("aider")), "--model", f"openai/{place.model}", *quiet),
            *("--analytics-disable", "--edit-format", "whole", "--message", place.prompt),
        ),
        {"OPENAI_API_BASE": f"{place.url}/v1", "OPENAI_API_KEY": place.key},
        {".aider.model.metadata.json": json.dumps(known)},
    )


CLIENTS = (
    Client(
        "Claude Code",
        "@anthropic-ai/claude-code",
        _claude,
        lambda line: Call("Bash", {"command": line, "description": "Runs it"}),
    ),
    Client("Codex", "@openai/codex", _codex, lambda line: Call("exec_command", {"cmd": line})),
    Client(
        "OpenCode",
        "opencode-ai",
        _opencode,
        lambda line: Call("bash", {"command": line, "description": "Runs it"}),
    ),
    Client(
        "Qwen Code",
        "@qwen-code/qwen-code",
        _qwen,
        lambda line: Call("run_shell_command", {"command": line, "is_background": False}),
    ),
    Client(
        "pi",
        "@earendil-works/pi-coding-agent",
        _pi,
        lambda line: Call("bash", {"command": line}),
    ),
    Client(
        "Continue",
        "@continuedev/cli",
        _continue,
        lambda line: Call("Bash", {"command": line}),
    ),
    Client(
        "Kilo Code",
        "@kilocode/cli",
        _kilo,
        lambda line: Call("bash", {"command": line, "description": "Runs it"}),
    ),
    Client(
        "Cline",
        "cline",
        _cline,
        lambda line: Call("run_commands", {"commands": [line]}),
    ),
    Client("aider", "aider-chat", _aider, None),
)
"""The scenarios of each are the rows of `CLIENTS.md`."""
