"""Opens only regular files: no pipe, device, link, or file of another user."""

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

SAFE = os.O_NONBLOCK | os.O_CLOEXEC
"""A pipe without a writer, or a device, must not block."""


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Descriptor of a regular file of this user (mode 0600 if `flags` create it). Raises `OSError`
    for links, pipes, sockets, folders and files of other users."""
    descriptor = _open(path, flags | os.O_NOFOLLOW)
    if os.fstat(descriptor).st_uid != os.getuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "belongs to another user", os.fspath(path))
    return descriptor


def make_folder(path: Path) -> None:
    """With missing parents, for this user only (mode 0700). Raises `OSError`."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def create_own(path: Path) -> int:
    """Descriptor of a new file with mode 0600, which replaces a file or link. Raises `OSError`."""
    path.unlink(missing_ok=True)
    return open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def read_own(path: Path, limit: int) -> bytes:
    """At most `limit` bytes of this user's file. Raises `OSError`."""
    with os.fdopen(open_own(path), "rb") as file:
        return _all(file, path, limit)


def replace_own(path: Path, data: bytes) -> None:
    """Write a file that only this user can read, atomically. Creates the folder. Raises `OSError`,
    also if others can write to the folder."""
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
    """At most `limit` bytes of a regular file; links are followed. Raises `OSError`."""
    with os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
        return _all(file, path, limit)


def read_trusted(path: Path, limit: int, *, closed_to: int) -> bytes:
    """A file that only this user and root can change; links are followed. `closed_to`: forbidden
    mode bits. Raises `OSError` with the remedy for another user's file or such a mode, and like
    `read_bounded`."""
    descriptor = _open(path, os.O_RDONLY)
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if state.st_uid not in (0, os.getuid()):
            raise PermissionError(errno.EPERM, "belongs to another user", os.fspath(path))
        if state.st_mode & closed_to:
            mode = f"{state.st_mode & ~closed_to & 0o777:o}"
            reason = f"is open to other users: `chmod {mode} {path}`"
            raise PermissionError(errno.EPERM, reason, os.fspath(path))
        return _all(file, path, limit)


def _all(file: BinaryIO, path: Path, limit: int) -> bytes:
    data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit} bytes", os.fspath(path))
    return data


def _open(path: Path, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | SAFE, 0o600)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a pipe, socket or folder
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def _not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "is no regular file", os.fspath(path))


def obstacle(folder: Path, home: Path | None = None) -> str:
    """What keeps this user from making or writing a folder, with the remedy. Empty: nothing.
    `home`: its variable is the remedy for folders below it."""
    folder = folder.absolute()
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return ""
    why = "cannot be written to" if nearest.is_dir() else "is not a folder"
    home = Path(os.path.expanduser("~")) if home is None else home  # noqa: PTH111 - `Path` raises
    if nearest == home or nearest in home.parents:
        return f"{nearest} {why}: set HOME to a folder of yours"
    return f"{nearest} {why}: remove it or make it a folder of yours"
