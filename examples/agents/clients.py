"""Coding agents: how each works without its user, and runs a command.

What tells them of a gateway are the records by which `mlx-provider launch` starts them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from installed import Installed

from mlx_provider.testing.scripted import Call

CODEX_UNASKED = "--dangerously-bypass-approvals-and-sandbox"
ALLOWED = '{"bash": "allow", "edit": "allow", "external_directory": "allow"}'


@dataclass(frozen=True)
class Agent:
    """One coding agent."""

    name: str
    record: str
    """By which `mlx-provider launch` knows it."""
    package: str
    program: Callable[[Installed], tuple[str, ...]]
    alone: Callable[[str], tuple[str, ...]]
    """Arguments by which it answers a prompt without its user, asks nobody, and ends."""
    shell: Callable[[str], Call] | None
    """The call by which it runs a command; `None`: it has no tools."""
    unasked: Mapping[str, str] = field(default_factory=dict)
    """Variables by which it asks nobody, where no argument does that."""


def _native(pattern: str) -> Callable[[Installed], tuple[str, ...]]:
    return lambda installed: (str(installed.native(pattern)),)


def _node(file: str) -> Callable[[Installed], tuple[str, ...]]:
    return lambda installed: (str(installed.node / "node"), str(installed.modules / file))


def _described(name: str) -> Callable[[str], Call]:
    return lambda line: Call(name, {"command": line, "description": "Runs it"})


AGENTS = (
    Agent(
        "Claude Code",
        "claude",
        "@anthropic-ai/claude-code",
        _native("@anthropic-ai/claude-code-*/claude"),
        lambda prompt: ("-p", prompt, "--allowedTools", "Bash"),
        _described("Bash"),
    ),
    Agent(
        "Codex",
        "codex",
        "@openai/codex",
        _native("@openai/codex-*/vendor/*/bin/codex"),
        lambda prompt: ("exec", "--skip-git-repo-check", CODEX_UNASKED, prompt),
        lambda line: Call("exec_command", {"cmd": line}),
    ),
    Agent(
        "OpenCode",
        "opencode",
        "opencode-ai",
        _native("opencode-*/bin/opencode"),
        lambda prompt: ("run", prompt),
        _described("bash"),
        {"OPENCODE_PERMISSION": ALLOWED},
    ),
    Agent(
        "Qwen Code",
        "qwen",
        "@qwen-code/qwen-code",
        _node("@qwen-code/qwen-code/cli-entry.js"),
        lambda prompt: ("-y", "-p", prompt),
        lambda line: Call("run_shell_command", {"command": line, "is_background": False}),
    ),
    Agent(
        "pi",
        "pi",
        "@earendil-works/pi-coding-agent",
        _node("@earendil-works/pi-coding-agent/dist/bundle/cli.js"),
        lambda prompt: ("-p", prompt),
        lambda line: Call("bash", {"command": line}),
    ),
    Agent(
        "Continue",
        "continue",
        "@continuedev/cli",
        _node("@continuedev/cli/dist/cn.js"),
        lambda prompt: ("--auto", "-p", prompt),
        lambda line: Call("Bash", {"command": line}),
    ),
    Agent(
        "Kilo Code",
        "kilo",
        "@kilocode/cli",
        _native("@kilocode/cli-*/bin/kilo"),
        lambda prompt: ("run", "--auto", prompt),
        _described("bash"),
    ),
    Agent(
        "Cline",
        "cline",
        "cline",
        _native("@cline/cli-*/bin/cline"),
        lambda prompt: ("--json", prompt),
        lambda line: Call("run_commands", {"commands": [line]}),
    ),
    Agent(
        "aider",
        "aider",
        "aider-chat",
        lambda installed: (str(installed.python("aider").with_name("aider")),),
        lambda prompt: ("--no-git", "--yes-always", "--message", prompt),
        None,
    ),
)
"""The scenarios of each are the rows of `CLIENTS.md`."""
