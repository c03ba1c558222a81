"""Clients: programs of others, such as coding agents, that are started on a gateway of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Gateway:
    """What a client is told of the gateway that it is to use, and of the model behind it."""

    url: str
    """Without a path: `http://127.0.0.1:4000`."""
    key: str = field(repr=False)
    """Belongs into `Profile.environment` or `Profile.files`; in an argument it is refused."""
    model: str
    """The name that clients ask for; names of other models lead to the same one."""
    context: int
    """Tokens of prompt and answer."""
    output: int
    """Tokens of an answer at most."""
    images: bool
    """The model sees."""
    folder: Path
    """Where the profile's files lie: the user's alone, and gone when the client has ended. The next
    launch has the same path, so that it may stand in a prompt."""
    workplace: Path
    """The folder that the client is started in."""


@dataclass(frozen=True)
class Profile:
    """What a client is run with, so that it reads and writes nothing of the user's own settings."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables, on top of the user's."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Content by path below `Gateway.folder`, whose mode will be 0600."""
    arguments: tuple[str, ...] = ()
    """Stand before the user's own."""
    hidden: tuple[str, ...] = ()
    """Patterns (`ANTHROPIC_*`) of the user's variables that would lead the client elsewhere."""


@dataclass(frozen=True)
class ClientServer:
    """One that a client's settings name."""

    url: str
    context: int | None = None
    """Tokens that the client takes the model's context to have, where it says so."""


@dataclass(frozen=True)
class ClientSettings:
    """Where a user's own settings of a client name a server: `doctor` reads them, nobody writes."""

    variables: tuple[str, ...] = ()
    """Of the environment, each an address."""
    files: tuple[str, ...] = ()
    """JSON, TOML or YAML by suffix, below the home folder; `$NAME/...` below a folder that a
    variable names instead."""
    servers: Callable[[Mapping[str, Any]], Iterable[ClientServer]] = lambda content: ()
    """Those that the content of a file names, which may be anything: strangers wrote it."""
    window: str = ""
    """The variable that tells the context where a variable tells the address."""


@dataclass(frozen=True)
class Client:
    """A program that speaks one of a gateway's APIs."""

    name: str
    """What users type: `mlx-provider launch <name>`."""
    command: str
    """The executable, as it is found on `PATH`."""
    install: str
    """The command that installs it, in one line."""
    profile: Callable[[Gateway], Profile]
    """How it is told of a gateway. Writes nothing itself."""
    api: Literal["chat", "messages", "responses"] = "chat"
    aliases: tuple[str, ...] = ()
    serves: str = ""
    """One line for people: what it is."""
    settings: ClientSettings = ClientSettings()
    prompt_bytes: int = 0
    """Of the body of its first request, without files of a project; 0: not known."""
