"""Starts the gateway at login by `mlx-provider up`: a launchd agent on a Mac, a systemd user unit
on Linux."""

from __future__ import annotations

import os
import plistlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..client.runtime_folder import MLX, OTHERS, SECRET
from ..config import PREFIX
from ..errors import EngineUnavailable
from ..safe_open import create_own

LABEL = "mlx-provider"
KEPT = (*OTHERS, "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")
"""Variables that a login does not set, but that select the gateway's files."""
SECRETS = (*SECRET, f"{PREFIX}API_KEY")
WANTS = "default.target"


@dataclass(frozen=True)
class LoginItem:
    path: Path
    content: bytes
    link: Path | None = None
    """As created by `systemctl --user enable`."""

    def write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(create_own(self.path), "wb") as file:
                file.write(self.content)
            if self.link is not None:
                self.link.parent.mkdir(parents=True, exist_ok=True)
                self.link.unlink(missing_ok=True)
                self.link.symlink_to(self.path)
        except OSError as error:
            raise EngineUnavailable(f"{self.path} cannot be written: {error.strerror}") from None

    def remove(self) -> bool:
        """Whether there was one. Raises `EngineUnavailable` if it cannot be removed."""
        there = self.path.exists()
        try:
            for path in (self.link, self.path):
                if path is not None:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise EngineUnavailable(f"{self.path} cannot be removed: {error.strerror}") from None
        return there


def login_item(
    log: Path, environ: Mapping[str, str] = os.environ, system: str = sys.platform
) -> LoginItem:
    command = [sys.executable, "-P", "-m", "mlx_provider.cli", "up"]
    kept = {
        name: value
        for name, value in sorted(environ.items())
        if value and (name.startswith(MLX) or name in KEPT) and name not in SECRETS
    }
    home = Path(environ.get("HOME") or "~").expanduser()
    if system == "darwin":
        path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        return LoginItem(path, _plist(command, kept, log))
    base = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "systemd" / "user"
    unit = base / f"{LABEL}.service"
    return LoginItem(unit, _unit(command, kept).encode(), base / f"{WANTS}.wants" / unit.name)


def _plist(command: list[str], variables: Mapping[str, str], log: Path) -> bytes:
    """launchd.plist(5). The output of `up` contains the key, so it is discarded."""
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": command,
            "EnvironmentVariables": dict(variables),
            "RunAtLoad": True,
            "AbandonProcessGroup": True,  # engine and proxy continue after `up`
            "ProcessType": "Interactive",  # otherwise they would get fewer resources
            "StandardErrorPath": os.fspath(log),
        }
    )


def _unit(command: list[str], variables: Mapping[str, str]) -> str:
    """systemd.service(5). The output of `up` contains the key, so it is discarded."""
    run = " ".join(_quoted(word) for word in command)
    stop = " ".join(_quoted(word) for word in [*command[:-1], "down"])
    lines = [
        "[Unit]",
        "Description=Local models: engine and LiteLLM proxy of mlx-provider",
        "[Service]",
        "Type=oneshot",
        "RemainAfterExit=yes",
        f"ExecStart={run}",
        f"ExecStop={stop}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in variables.items()),
        "StandardOutput=null",
        "[Install]",
        f"WantedBy={WANTS}",
    ]
    return "\n".join(lines) + "\n"


def _quoted(word: str) -> str:
    """As in systemd.syntax(7), with `%` escaped. `$` needs no escape in paths and variables."""
    escaped = re.sub(r'(["\\])', r"\\\1", word).replace("%", "%%")
    return '"' + escaped.replace("\n", "\\n") + '"'
