"""Clients: programs, such as coding agents, that are started on our gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Gateway:
    """The gateway that a client uses, and its model."""

    url: str
    """Without a path: `http://127.0.0.1:4000`."""
    key: str = field(repr=False)
    """Put it into `Profile.environment` or `Profile.files`; an argument with it is refused."""
    model: str
    """The model's name for clients; any other name leads to the same model."""
    context: int
    """Tokens of prompt and answer."""
    output: int
    """Tokens of an answer at most."""
    images: bool
    """The model takes images."""
    folder: Path
    """Folder of the profile's files. Only the user can read it; it is deleted when the client ends.
    Its path is the same at the next launch, so a prompt may contain it."""
    workplace: Path
    """The client's working folder."""


@dataclass(frozen=True)
class Profile:
    """How a client is run, so that it neither reads nor writes the user's own settings."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the user's."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Content by path below `Gateway.folder`; the mode will be 0600."""
    arguments: tuple[str, ...] = ()
    """They come before the user's own."""
    hidden: tuple[str, ...] = ()
    """Patterns (`ANTHROPIC_*`) of the user's variables that would redirect the client."""


@dataclass(frozen=True)
class Client:
    """A program that speaks one of a gateway's APIs."""

    name: str
    """As in `mlx-provider launch <name>`."""
    command: str
    """The executable on `PATH`."""
    install: str
    """The command that installs it, on one line."""
    profile: Callable[[Gateway], Profile]
    """The profile for a gateway. Writes nothing itself."""
    api: Literal["chat", "messages", "responses"] = "chat"
    aliases: tuple[str, ...] = ()
    serves: str = ""
    """One line for people."""
    prompt_bytes: int = 0
    """Size of its first request without files of a project; 0: not known."""
    subagent: Callable[[Gateway], Profile] | None = None
    """The profile that keeps the user's own settings and main model, and adds an agent with the
    gateway's model. Writes nothing itself. `None`: the client cannot have one."""
    forwards: str = ""
    """The main model, as in an entry of LiteLLM (`anthropic/claude-*`), if a `subagent` profile
    sends its requests to the gateway, too. The gateway passes them on with the client's own login,
    or the key in the user's environment."""
