"""The key of an engine that listens on TCP: given, or generated and stored for its owner only."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..config import PREFIX
from ..errors import BadRequest, EngineUnavailable
from ..safe_open import read_trusted

LONGEST = 4096


def engine_key(file: Path | None, environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The key, and where a person finds it.

    From `file` if given, else from `MLX_PROVIDER_API_KEY`, else from the owner's key file, which is
    created if missing. Raises `BadRequest` for a file that others can read, `EngineUnavailable` if
    no key file can be created.
    """
    if file is not None:
        return read_key(file), str(file)
    given = environ.get(PREFIX + "API_KEY", "").strip()
    if given:
        return given, PREFIX + "API_KEY"
    own = own_key_file(environ)
    return kept_key(own, f"set {PREFIX}API_KEY, or name a file with --api-key-file"), str(own)


def own_key_file(environ: Mapping[str, str] = os.environ, name: str = "engine.key") -> Path:
    """The default key file of this user."""
    base = environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "mlx-provider" / name


def kept_key(file: Path, remedy: str = "name a file that holds one") -> str:
    """The key in a file of this user, which is created if missing.

    Raises `BadRequest` for a file that others can read, `EngineUnavailable` with the remedy if it
    cannot be created.
    """
    try:
        return _made(file)
    except OSError as error:
        summary = f"no key can be kept in {file} ({error.strerror}): {remedy}"
        raise EngineUnavailable(summary) from None


def read_key(file: Path) -> str:
    """The key in a file. Raises `BadRequest` for a file that others can read, or without a key."""
    try:
        key = read_trusted(file, LONGEST, closed_to=0o077).decode("ascii", "replace").strip()
    except OSError as error:
        raise BadRequest(f"key file {file}: {error.strerror}", param="api_key_file") from None
    if not key.isprintable() or not key.isascii() or not key:
        raise BadRequest(f"key file {file} holds no key (one line of text)", param="api_key_file")
    return key


def _made(file: Path) -> str:
    if file.exists():
        return read_key(file)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=file.parent)  # readable only by the owner
    try:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(secrets.token_urlsafe(32) + "\n")
        # Of several processes, one comes first, and the file never has a partial key.
        with suppress(FileExistsError):
            os.link(draft, file)
    finally:
        Path(draft).unlink()
    return read_key(file)
