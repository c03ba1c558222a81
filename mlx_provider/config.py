"""Folders of this user and machine, and versions of packages."""

import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .errors import BadRequest

PREFIX = "MLX_PROVIDER_"  # of environment variables
LOCK = "engine.lock"


@dataclass(frozen=True)
class Runtime:
    """Where this user's engine is, and the variables with which a client starts it."""

    folder: Path
    """Owner-only folder for socket, lock and log: `MLX_PROVIDER_RUNTIME_DIR`."""
    environment: Mapping[str, str] = field(repr=False)

    @property
    def socket(self) -> Path:
        return self.folder / "engine.sock"

    @property
    def lock(self) -> Path:
        return self.folder / LOCK

    @property
    def log(self) -> Path:
        return self.folder / "engine.log"

    def listens(self) -> bool:
        """Whether a process accepts connections at the socket; false if it is stale or absent."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(5)
            try:
                probe.connect(os.fspath(self.socket))
            except OSError:
                return False
            return True


def runtime(environ: Mapping[str, str] = os.environ) -> Runtime:
    """The folder is the one that `MLX_PROVIDER_RUNTIME_DIR` names, else one in `XDG_RUNTIME_DIR`,
    else one per user in the folder of temporary files. It is not created. Raises `BadRequest`."""
    chosen = environ.get(PREFIX + "RUNTIME_DIR")
    if chosen:
        try:
            return Runtime(Path(chosen).expanduser().absolute(), environ)
        except RuntimeError as error:  # `~nobody/run`
            raise BadRequest(f"{PREFIX}RUNTIME_DIR={chosen} must be a path: {error}") from None
    session = environ.get("XDG_RUNTIME_DIR")
    if session and Path(session).is_dir():
        return Runtime(Path(session) / "mlx-provider", environ)
    return Runtime(Path(tempfile.gettempdir()) / f"mlx-provider-{os.getuid()}", environ)


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """For files that outlive an engine. Raises `RuntimeError` if the home folder is not known."""
    return Path(environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "mlx-provider"


def home_state(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Like `state_folder`, with `None` if the home folder is not known."""
    try:
        return state_folder(environ)
    except RuntimeError:
        return None


def installed_version(distribution: str) -> str:
    """The version of a distribution; empty: it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
