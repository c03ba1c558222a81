"""Settings of this process from environment variables, its folders, and versions of packages."""

import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from .errors import BadRequest

PREFIX = "MLX_PROVIDER_"
LOCK = "engine.lock"


@dataclass(frozen=True)
class FixedSettings:
    """Values for every machine. Only tests change them."""

    queue_per_row: int = 4
    """Waiting requests per row of `max_rows`. More get 429."""
    model_wait: float = 60.0
    """Seconds of waiting for memory that other models use, then 503."""
    output_reserve: int = 512
    """Output tokens for which memory is reserved at admission."""
    kv_layout: str = "auto"
    """`auto`: the best by the probe; or `grouped`, `merged`, `solo`."""
    feature_bytes: int = 256 * 2**20
    """Bytes per model for cached features of images."""
    body_bytes: int = 128 * 2**20
    """Bytes of request bodies that are read and prepared at once. A larger body is refused."""
    media_bytes: int = 2**30
    """Bytes of images: half while they are decoded, half while they wait for prefill."""
    measurements: str = "auto"
    """File with measurements for the next load. `auto`: in the state folder; `off`; or a path."""
    log_level: str = "info"
    prefix_bytes: int | None = None
    """Bytes of the prefix cache. Unset: a share of the memory that weights leave."""


@dataclass(frozen=True)
class EngineSettings(FixedSettings):
    """Each field here has a variable `MLX_PROVIDER_<FIELD>`, read by its entry in `_KINDS`."""

    memory_limit: int | None = None
    """Bytes for weights, rows, passes, free buffers and prefixes. Unset: `serving/memory_limit.py`
    computes it."""
    max_rows: int = 64
    """Most decoding rows. More requests wait."""
    stall_target: float = 0.1
    """Average seconds per token of a stream while a prompt is prefilled."""
    max_chunk: int = 2048
    """Most tokens of a prefill chunk while no row decodes."""
    idle_timeout: float = 600.0
    """An engine that a client has started ends after so many seconds without a client."""
    disk_cache: Path | None = None
    """Folder of the disk tier; `None`: no disk tier. If the variable is unset, `engine_settings`
    takes the state folder."""
    disk_cache_bytes: int | None = None
    """Most bytes of the disk tier; 0: none. Unset: by the free space."""
    models_file: Path | None = None
    """TOML: options per model that only the engine's owner can grant (`serving.permissions`)."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names of an engine on TCP, in addition to its own."""
    model_roots: tuple[Path, ...] = ()
    """Folders of models. Clients of a wildcard entry, and clients on other machines, can name no
    model folder outside them."""

    @property
    def max_queue(self) -> int:
        return self.queue_per_row * self.max_rows


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
        """Whether a process accepts connections; false for a stale socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(5)
            try:
                probe.connect(os.fspath(self.socket))
            except OSError:
                return False
            return True


def runtime(environ: Mapping[str, str] = os.environ) -> Runtime:
    """The folder that the variable names, else one in `XDG_RUNTIME_DIR`, else one per user in the
    folder of temporary files."""
    chosen = environ.get(PREFIX + "RUNTIME_DIR")
    if chosen:
        return Runtime(Path(chosen).expanduser().absolute(), environ)
    session = environ.get("XDG_RUNTIME_DIR")
    if session and Path(session).is_dir():
        return Runtime(Path(session) / "mlx-provider", environ)
    return Runtime(Path(tempfile.gettempdir()) / f"mlx-provider-{os.getuid()}", environ)


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "mlx-provider"


def engine_settings(environ: Mapping[str, str] = os.environ) -> EngineSettings:
    """Raises `BadRequest` that names the variable and its valid values."""
    given = {
        name: _parse(name, kind, environ[PREFIX + name.upper()])
        for name, kind in _KINDS.items()
        if environ.get(PREFIX + name.upper())
    }
    return EngineSettings(**{"disk_cache": home_state(environ)} | given)  # type: ignore[arg-type]


def home_state(environ: Mapping[str, str] = os.environ) -> Path | None:
    """`state_folder`. `None`: the home folder is not known."""
    try:
        return state_folder(environ)
    except RuntimeError:
        return None


class _NumberFormat(NamedTuple):
    """How a number is read, and its limits. Infinity and NaN are refused."""

    read: Callable[[str], float]
    minimum: float
    maximum: int
    words: str
    """The valid values, for errors."""


def parse_bytes(text: str) -> int:
    """`"512M"`, `"12GiB"` or `"1000"` (powers of two). Raises `ValueError`, and `OverflowError` for
    infinity."""
    body = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = body[-1:] if body[-1:] in "KMGT" else ""
    return int(float(body.removesuffix(unit)) * 2 ** (10 * " KMGT".index(unit or " ")))


_BYTES = "a number of bytes (as 512M or 12G) of at least"
_COUNT = _NumberFormat(int, 1, 2**31 - 1, "a whole number of at least 1")
_SECONDS = _NumberFormat(float, 1e-9, 10**9, "a number of seconds above 0")
_KINDS: dict[str, str | _NumberFormat] = {
    "memory_limit": _NumberFormat(parse_bytes, 1, 2**60, f"{_BYTES} 1"),
    "max_rows": _COUNT,
    "stall_target": _SECONDS,
    "max_chunk": _COUNT,
    "idle_timeout": _SECONDS,
    "disk_cache": "path",
    "disk_cache_bytes": _NumberFormat(parse_bytes, 0, 2**60, f"{_BYTES} 0"),
    "models_file": "path",
    "allowed_hosts": "names",
    "model_roots": "paths",
}
SETTING_NAMES = tuple(_KINDS)


def _parse(name: str, kind: str | _NumberFormat, text: str) -> object:
    if isinstance(kind, _NumberFormat):
        with suppress(ValueError, OverflowError):
            if kind.minimum <= (number := kind.read(text)) <= kind.maximum:
                return number
        valid = f"{kind.words} and at most {kind.maximum:,}"
        raise BadRequest(f"{PREFIX}{name.upper()}={text!r}: give {valid}")
    if kind == "names":
        return tuple(name.strip() for name in text.split(",") if name.strip())
    if kind == "paths":
        return tuple(Path(path).expanduser() for path in text.split(os.pathsep) if path)
    return Path(text).expanduser()


def installed_version(distribution: str) -> str:
    """Empty: it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
