"""A client's files, variables and command, from its record and a gateway."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from ..errors import BadRequest, NotInstalled, PluginError
from ..isolation import plugin_call
from ..records import Client, Gateway, Profile

DIRECT = ("NO_PROXY", "no_proxy")
LOOPBACK = "127.0.0.1,localhost"
HIDDEN_KEY = "sk-..."


@dataclass(frozen=True)
class Prepared:
    command: tuple[str, ...]
    added: Mapping[str, str]
    """Variables that differ from the user's environment."""
    hidden: tuple[str, ...]
    """Variables of the user that the client does not get."""
    files: Mapping[str, str]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in environ.items() if name not in self.hidden}
        return {**kept, **self.added}


def executable(client: Client, environ: Mapping[str, str] = os.environ) -> str:
    """Raises `NotInstalled` with the command that installs it."""
    found = shutil.which(client.command, path=environ.get("PATH"))
    if found is None:
        raise NotInstalled(f"{client.command} is not installed: {client.install}")
    return found


def is_installed(client: Client) -> bool:
    return shutil.which(client.command) is not None


def prepare(
    client: Client,
    gateway: Gateway,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    program: str | None = None,
    *,
    as_subagent: bool = False,
) -> Prepared:
    """The profile from the client's record. Writes nothing.

    `program`: unset: the bare name of the command. `as_subagent`: see `Client.subagent`. Raises
    `BadRequest` if the client has none, `PluginError` for a profile that fails, would show the key
    in `ps`, or has files outside its folder."""
    profile = _profile(client, gateway, as_subagent=as_subagent)
    command = (program or client.command, *profile.arguments, *arguments)
    if any(gateway.key in word for word in command):
        raise PluginError(f"client {client.name!r}: the key stands on its command line")
    for name in profile.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise PluginError(f"client {client.name!r}: file {name!r} is outside of its folder")
    hidden = [n for n in environ if any(fnmatchcase(n, p) for p in profile.hidden)]
    added = {**direct(environ), **profile.environment}
    return Prepared(command, added, tuple(sorted(set(hidden) - added.keys())), profile.files)


def _profile(client: Client, gateway: Gateway, *, as_subagent: bool) -> Profile:
    make = client.subagent if as_subagent else client.profile
    if make is None:
        name = client.serves or client.name
        raise BadRequest(f"no agent of {name} can have a model of another server than its main one")
    problem = f"client {client.name!r}: its profile failed: "
    profile = plugin_call(lambda: make(gateway), lambda fault: PluginError(problem + fault.summary))
    if not isinstance(profile, Profile):
        raise PluginError(f"{problem}gave {type(profile).__name__}, not Profile")
    return profile


def direct(environ: Mapping[str, str]) -> dict[str, str]:
    """Reaches loopback without the user's proxy."""
    return {name: ",".join(filter(None, (environ.get(name), LOOPBACK))) for name in DIRECT}


def write_files(prepared: Prepared, folder: Path) -> None:
    for name, content in prepared.files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)


def preview(prepared: Prepared, gateway: Gateway) -> list[str]:
    lines = [f"{name}={value}" for name, value in prepared.added.items()]
    lines += [f"unset {name}" for name in prepared.hidden]
    for name, content in prepared.files.items():
        lines += [f"# {gateway.folder / name}", *content.splitlines()]
    lines += ["# command", shlex.join(prepared.command)]
    return [line.replace(gateway.key, HIDDEN_KEY) for line in lines]
