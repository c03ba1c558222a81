"""The keys of an engine that listens on TCP: given, or one generated and stored for its owner."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..config import PREFIX
from ..errors import EngineUnavailable
from ..safe_open import make_folder
from .keys import Key, read_key, read_keys


def engine_keys(
    file: Path | None, environ: Mapping[str, str] = os.environ
) -> tuple[tuple[Key, ...], str]:
    """The keys, and where a person finds them: from `file`, else `MLX_PROVIDER_API_KEY`, else the
    owner's key file, which is created if missing. Raises `BadRequest` as `read_keys`,
    `EngineUnavailable` if no key file can be created."""
    if file is not None:
        return read_keys(file), str(file)
    given = environ.get(PREFIX + "API_KEY", "").strip()
    if given:
        return (Key(given),), PREFIX + "API_KEY"
    own = own_key_file(environ)
    kept = kept_key(own, f"set {PREFIX}API_KEY, or name a file with --api-key-file")
    return (Key(kept),), str(own)


def own_key_file(environ: Mapping[str, str] = os.environ, name: str = "engine.key") -> Path:
    base = environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "mlx-provider" / name


def kept_key(file: Path, remedy: str = "name a file that holds one") -> str:
    """Creates the file if missing. Raises `BadRequest` as `read_key`, `EngineUnavailable` with the
    remedy if it cannot be created."""
    try:
        return _made(file)
    except OSError as error:
        summary = f"no key can be kept in {file} ({error.strerror}): {remedy}"
        raise EngineUnavailable(summary) from None


def _made(file: Path) -> str:
    if file.exists():
        return read_key(file)
    make_folder(file.parent)
    descriptor, draft = tempfile.mkstemp(dir=file.parent)  # readable only by the owner
    try:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(secrets.token_urlsafe(32) + "\n")
        # of several processes one is first, and the file never has a partial key
        with suppress(FileExistsError):
            os.link(draft, file)
    finally:
        Path(draft).unlink()
    return read_key(file)
