"""Settings of this process, read from the environment in one place."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from .errors import BadRequest

PREFIX = "MLX_PROVIDER_"
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class EngineSettings:
    """How one engine process behaves; every field has a variable `MLX_PROVIDER_<FIELD>`."""

    memory_limit: int | None = None
    """Bytes for weights, live rows, their passes, MLX's free buffers and the prefix cache; unset:
    85 % of what the device recommends or has."""
    max_rows: int = 64
    """Rows that decode together; further requests wait."""
    max_queue: int = 256
    """Requests that may wait; the next one is refused with 429."""
    model_wait: float = 60.0
    """Seconds that a request waits for other models to make room; it is refused with 503 then."""
    stall_target: float = 0.1
    """Seconds by which one prefill chunk may delay rows that decode."""
    max_chunk: int = 2048
    """Prompt tokens of one prefill chunk while nobody decodes."""
    output_reserve: int = 512
    """Output tokens for which memory is set aside at admission."""
    idle_timeout: float = 600.0
    """Seconds without a client after which an engine process that a client started ends."""
    kv_layout: str = "auto"
    """`auto`, or the one layout to use: `grouped`, `merged`, `solo`."""
    prefix_bytes: int | None = None
    """Byte budget of the prefix cache; unset: a share of what weights leave."""
    disk_cache: Path | None = None
    """Folder of the prefix cache's disk tier; unset: no disk tier."""
    disk_cache_bytes: int = 10 * 2**30
    """Size bound of the disk tier."""
    feature_bytes: int = 256 * 2**20
    """Byte budget per model for features of images seen before."""
    body_bytes: int = 128 * 2**20
    """Bytes of request bodies that are read and prepared at once; the largest one, too."""
    media_bytes: int = 2**30
    """Bytes of images at once: half while they are decoded, half while they wait for prefill."""
    measurements: str = "auto"
    """File of what is measured of a model at load, for the next time: `auto`, in the runtime
    folder; `off`: none; else its path."""
    blas: str = "auto"
    """`auto`: load an optimised BLAS where one is found; `bundled`: MLX's own; else a path."""
    log_level: str = "info"
    models_file: Path | None = None
    """TOML of options per model that only the engine's owner grants (`chat.grants`)."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients address an engine on TCP, besides its own names and addresses."""
    model_roots: tuple[Path, ...] = ()
    """Folders under which clients of a wildcard entry, and other machines, may name models."""


@dataclass(frozen=True)
class Runtime:
    """Where this user's engine process on this machine is found."""

    folder: Path
    """Owner-only folder for socket, lock and log: `MLX_PROVIDER_RUNTIME_DIR`."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def socket(self) -> Path:
        return self.folder / "engine.sock"

    @property
    def lock(self) -> Path:
        return self.folder / "engine.lock"

    @property
    def measurements(self) -> Path:
        return self.folder / "measurements.json"

    @property
    def log(self) -> Path:
        return self.folder / "engine.log"

    def listens(self) -> bool:
        """Whether somebody accepts connections on the socket; false for a stale one."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(5)
            try:
                probe.connect(os.fspath(self.socket))
            except OSError:
                return False
            return True


def runtime(environ: Mapping[str, str] = os.environ) -> Runtime:
    """The runtime folder: the variable, else the session's, else one per user in the temp dir."""
    chosen = environ.get(PREFIX + "RUNTIME_DIR")
    if chosen:
        return Runtime(Path(chosen), environ)
    session = environ.get("XDG_RUNTIME_DIR")
    if session and Path(session).is_dir():
        return Runtime(Path(session) / "mlx-provider", environ)
    return Runtime(Path(tempfile.gettempdir()) / f"mlx-provider-{os.getuid()}", environ)


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where what this user's programs have found out is kept, longer than a session lasts."""
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "mlx-provider"


def engine_settings(environ: Mapping[str, str] = os.environ) -> EngineSettings:
    """Settings from the environment.

    Raises `BadRequest` that names the variable and what it takes.
    """
    given = {
        name: _parse(name, kind, environ[PREFIX + name.upper()])
        for name, kind in _KINDS.items()
        if environ.get(PREFIX + name.upper())
    }
    return EngineSettings(**given)  # type: ignore[arg-type]


_KINDS: dict[str, str] = {
    "memory_limit": "bytes",
    "max_rows": "count",
    "max_queue": "count",
    "model_wait": "seconds",
    "stall_target": "seconds",
    "max_chunk": "count",
    "output_reserve": "count",
    "idle_timeout": "seconds",
    "kv_layout": "layout",
    "prefix_bytes": "bytes",
    "disk_cache": "path",
    "disk_cache_bytes": "bytes",
    "feature_bytes": "bytes",
    "body_bytes": "bytes",
    "media_bytes": "bytes",
    "measurements": "text",
    "blas": "text",
    "log_level": "text",
    "models_file": "path",
    "allowed_hosts": "names",
    "model_roots": "paths",
}

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _parse(name: str, kind: str, text: str) -> object:
    try:
        if kind == "bytes":
            return parse_bytes(text)
        if kind == "count":
            return _positive(int(text))
        if kind == "seconds":
            return _positive(float(text))
    except ValueError:
        raise BadRequest(f"{PREFIX}{name.upper()}={text!r} is not a number of {kind}") from None
    if kind == "layout" and text not in ("auto", "grouped", "merged", "solo"):
        raise BadRequest(f"{PREFIX}KV_LAYOUT={text!r} is none of auto, grouped, merged, solo")
    if kind == "names":
        return tuple(each.strip() for each in text.split(",") if each.strip())
    if kind == "paths":
        return tuple(Path(each).expanduser() for each in text.split(os.pathsep) if each)
    return Path(text).expanduser() if kind == "path" else text


def parse_bytes(text: str) -> int:
    """`"512M"`, `"12GiB"` or `"1000"` as bytes (powers of two). Raises `ValueError`."""
    body = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = body[-1:] if body[-1:] in "KMGT" else ""
    return _positive(int(float(body.removesuffix(unit)) * _UNITS[unit]))


def _positive(number: N) -> N:
    if number < 0:
        raise ValueError(number)
    return number
