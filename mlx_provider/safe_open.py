"""Opens only regular files, no pipes or devices: `*_own` only this user's and no links,
`read_trusted` also root's, `read_bounded` anyone's. All but `obstacle` raise `OSError`."""

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

SAFE = os.O_NONBLOCK | os.O_CLOEXEC
"""A pipe without a writer, or a device, must not block."""


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Descriptor of a regular file of this user (mode 0600 if `flags` create it). Raises also for
    links, sockets, folders and files of other users."""
    descriptor = _open(path, flags | os.O_NOFOLLOW)
    if os.fstat(descriptor).st_uid != os.getuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "belongs to another user", os.fspath(path))
    return descriptor


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents for this user only (mode 0700), if it is missing."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def create_own(path: Path) -> int:
    """Descriptor of a new file with mode 0600, which replaces a file or link."""
    path.unlink(missing_ok=True)
    return open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def read_own(path: Path, limit: int) -> bytes:
    """All of this user's file. Raises also if it has more than `limit` bytes."""
    with os.fdopen(open_own(path), "rb") as file:
        return _read_within(limit, file, path)


def replace_own(path: Path, data: bytes) -> None:
    """Write a file that only this user can read, atomically, and its folder if that is missing.
    Raises also if others can write to the folder."""
    make_folder(path.parent)
    state = path.parent.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others may write to its folder", os.fspath(path))
    descriptor, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(draft).replace(path)
    finally:
        Path(draft).unlink(missing_ok=True)


def read_bounded(path: Path, limit: int) -> bytes:
    """All of anyone's file; links are followed. Raises also if it has more than `limit` bytes."""
    with os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
        return _read_within(limit, file, path)


def read_trusted(path: Path, limit: int, *, closed_to: int) -> bytes:
    """Like `read_bounded`. Raises also unless the file is this user's or root's and has none of the
    mode bits `closed_to` (`0o022`: nobody else can change it); that error names the remedy."""
    descriptor = _open(path, os.O_RDONLY)
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if state.st_uid not in (0, os.getuid()):
            raise PermissionError(errno.EPERM, "belongs to another user", os.fspath(path))
        if state.st_mode & closed_to:
            mode = f"{state.st_mode & ~closed_to & 0o777:o}"
            reason = f"is open to other users: `chmod {mode} {path}`"
            raise PermissionError(errno.EPERM, reason, os.fspath(path))
        return _read_within(limit, file, path)


def _read_within(limit: int, file: BinaryIO, path: Path) -> bytes:
    data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit} bytes", os.fspath(path))
    return data


def _open(path: Path, flags: int) -> int:
    irregular = OSError(errno.EINVAL, "is no regular file", os.fspath(path))
    try:
        descriptor = os.open(path, flags | SAFE, 0o600)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a pipe, socket or folder
            raise irregular from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise irregular
    return descriptor


def obstacle(folder: Path, home: Path | None = None) -> str:
    """What keeps this user from making `folder` or writing to it, with a remedy after ": "; empty:
    nothing. `home`: if this folder is the cause, the remedy is to set `HOME`."""
    folder = folder.absolute()
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return ""
    why = "cannot be written to" if nearest.is_dir() else "is not a folder"
    home = Path(os.path.expanduser("~")) if home is None else home  # noqa: PTH111 - `Path` raises
    if folder.is_relative_to(home) and home.is_relative_to(nearest):
        return f"{nearest} {why}: set HOME to a folder of yours"
    return f"{nearest} {why}: make {folder} a folder of yours"
