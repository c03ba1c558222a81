"""The owner-only folder of a user's engine: its checks, the engine's lock, and the identity
(versions, plugins, settings) by which a client sees that a running engine is out of date."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import site
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from ..config import PREFIX, Runtime, installed_version
from ..errors import EngineUnavailable
from ..registry.discovery import SELECTION, find_plugins, selection, times
from ..safe_open import make_folder, open_own, read_bounded
from ..upstream.runtime import VARIABLES

# ---- identity

OWN, PYTHON = "mlx-provider", "python"
PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "transformers")
HUB_VARIABLES = "HF_ENDPOINT HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_TOKEN".split()
NOT_IDENTITY = {*(PREFIX + name for name in ("API_KEY", "IDLE_TIMEOUT", "RUNTIME_DIR")), *VARIABLES}
"""Variables that make no engine out of date: a secret, those in which its clients may differ, and
those that the engine sets itself."""


def identity(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What an engine would be that starts now: versions, plugins of third parties, Python and
    variables, by name. Secrets are digests."""
    found = {name: installed_version(name) for name in PACKAGES} | dict(_plugins(environ))
    found |= {OWN: __version__, PYTHON: f"{sys.prefix} ({platform.python_version()})"}
    for name in sorted(environ.keys() - NOT_IDENTITY):
        counts = name.startswith("MLX_") or name.endswith("_SLIDING_WINDOW")
        counts |= name in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", *HUB_VARIABLES)
        # empty counts as unset, but an empty list of plugins means that there are none
        if counts and (environ[name] or name == SELECTION):
            found[name] = _digest(environ[name]) if name == "HF_TOKEN" else environ[name]
    return found


def _plugins(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Third-party plugins in site-packages and PYTHONPATH. An engine would not find those that are
    only on this program's own `sys.path`."""
    wanted, searched = selection(environ), [*site.getsitepackages(), site.getusersitepackages()]
    searched += filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = {os.path.realpath(folder) for folder in searched}
    for plugin, point in find_plugins():
        if plugin.built_in or (wanted is not None and plugin.name not in wanted):
            continue
        if point.dist is not None and os.path.realpath(str(point.dist.locate_file(""))) in folders:
            sources = _digest(repr(sorted(times(point).items())))
            yield f"plugin {plugin.name}", f"{plugin.distribution} {plugin.version}, {sources}"


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """Texts about what differs, by name. Empty also if the other engine gave no identity."""
    if not theirs:
        return {}
    names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    return {n: f"{n}: {theirs.get(n, 'unset')}, here {ours.get(n, 'unset')}" for n in names}


def is_outdated() -> bool:
    """Whether another version is now installed, so that no engine of this version can start."""
    return installed_version(OWN) not in ("", __version__)


def _digest(text: str) -> str:
    return "digest " + hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


# ---- folder

OTHER_FOLDER = f"set {PREFIX}RUNTIME_DIR to a folder of your own"  # a remedy
LONGEST_SOCKET_PATH = 103  # bytes, the least of all systems (macOS 103, Linux 107)


def check_folder(runtime: Runtime, *, make: bool = False) -> bool:
    """Whether the folder exists, which `make` creates. Raises `EngineUnavailable` if another user
    can access it, or if it cannot be created, now or later. Each message names the folder, and ends
    with a remedy after its last ": "."""
    folder = runtime.folder
    if len(os.fsencode(runtime.socket)) > LONGEST_SOCKET_PATH:
        raise EngineUnavailable(
            f"{runtime.socket} is too long for a unix socket: "
            f"set {PREFIX}RUNTIME_DIR to a shorter path"
        )
    try:
        if make:
            make_folder(folder)
        link, target = folder.lstat(), folder.stat()
    except FileNotFoundError as error:
        nearest = next(parent for parent in folder.absolute().parents if parent.exists())
        if make or not os.access(nearest, os.W_OK | os.X_OK):
            raise _unusable(folder, error.errno if make else errno.EACCES) from None
        return False
    except OSError as error:
        raise _unusable(folder, error.errno) from None
    if not stat.S_ISDIR(target.st_mode):
        raise _unusable(folder, errno.ENOTDIR)
    if {link.st_uid, target.st_uid} != {os.getuid()}:
        raise EngineUnavailable(f"runtime folder {folder} belongs to another user: {OTHER_FOLDER}")
    if stat.S_IMODE(target.st_mode) & 0o077:
        raise EngineUnavailable(
            f"runtime folder {folder} is open to other users: run `chmod 700 {folder}` "
            f"or set {PREFIX}RUNTIME_DIR to another folder"
        )
    return True


def _unusable(folder: Path, number: int | None) -> EngineUnavailable:
    why = os.strerror(number or 0)
    return EngineUnavailable(f"runtime folder {folder} cannot be used ({why}): {OTHER_FOLDER}")


def open_own_file(path: Path, flags: int) -> int:
    """A descriptor. Raises `EngineUnavailable` if it is not a regular file of this user."""
    try:
        return open_own(path, flags)
    except OSError as error:
        raise EngineUnavailable(
            f"{path} cannot be used ({error.strerror}): remove it, or set {PREFIX}RUNTIME_DIR "
            "to another folder"
        ) from None


# ---- lock

POLL = 0.05  # seconds
READY = b"ready\n"
"""What a started engine writes to `--ready-fd` once it listens. If it fails, an `ErrorBody`."""


@dataclass(frozen=True)
class EngineLock:
    """The engine process has the lock as long as it lives. A client acquires it and passes its
    descriptor to the process that it starts, so that no second engine can start in between."""

    descriptor: int

    @classmethod
    def try_take(cls, path: Path) -> EngineLock | None:
        """`None` while another process holds it. Raises `EngineUnavailable`."""
        descriptor = open_own_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return cls(descriptor)
        # removed between open and lock: a lock on an unlinked file protects nothing
        os.close(descriptor)
        return cls.try_take(path)

    @classmethod
    def inherit(cls, descriptor: int) -> EngineLock:
        """The lock of the starting client. Child processes do not inherit it."""
        os.set_inheritable(descriptor, False)
        return cls(descriptor)

    def sign(self, pid: int | None = None) -> None:
        """Write the process id of the holder into the file."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"{pid or os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Close this process's descriptor. A child process with a copy still has the lock."""
        os.close(self.descriptor)


def holder(path: Path) -> str:
    """The process id in a lock's file, or `unknown`."""
    try:
        return read_bounded(path, 100).decode(errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"


def is_held(path: Path) -> bool:
    """Whether a process has the lock. Takes it for a moment to find out."""
    if not path.exists():
        return False
    lock = EngineLock.try_take(path)
    if lock is not None:
        lock.release()
    return lock is None


def why_none_runs(runtime: Runtime) -> str:
    """Why there is no engine; empty: a process holds the lock. Raises `EngineUnavailable` for what
    prevents a start: a folder that cannot be used, or something else at the socket's path."""
    has_socket = check_folder(runtime) and runtime.socket.exists()
    if has_socket and not runtime.socket.is_socket():
        raise EngineUnavailable(f"{runtime.socket} is not a socket: remove it")
    if is_held(runtime.lock):
        return ""
    if not has_socket:
        return f"no engine runs in {runtime.folder}: the first request starts one"
    if runtime.listens():
        raise EngineUnavailable(
            f"some process that is no engine of mlx-provider listens on {runtime.socket}: end it "
            f"(`lsof {runtime.socket}` names it), or set {PREFIX}RUNTIME_DIR to another folder"
        )
    return (
        f"no engine runs: {runtime.socket} was left behind by one that was killed, "
        "and the next request starts another in its place"
    )


def has_ended(path: Path, pid: int | str, seconds: float) -> bool:
    """Whether the process frees the lock within so many seconds; another one may then hold it."""
    deadline = time.monotonic() + seconds
    while is_held(path) and holder(path) == str(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True


# ---- log

LARGEST_LOG = 8 * 2**20  # bytes; a larger log is renamed to `*.log.1`, in place of an earlier one
LOG_POLL = 1.0  # seconds


def limit_log(path: Path) -> None:
    """Begin a new log file whenever `path`, to which this process's output goes, is larger than
    `LARGEST_LOG`. A thread looks every `LOG_POLL` seconds."""

    def watch() -> None:
        while True:
            time.sleep(LOG_POLL)
            with suppress(EngineUnavailable, OSError):  # the next look tries again
                if os.fstat(2).st_size > LARGEST_LOG:
                    with os.fdopen(open_log(path), "ab") as log:
                        os.dup2(log.fileno(), 1)
                        os.dup2(log.fileno(), 2)

    threading.Thread(target=watch, daemon=True, name="log size").start()


def tail(log: Path, begin: int = 0) -> str:
    """The last lines from byte `begin` on without tracebacks, joined with " / "."""
    try:
        with os.fdopen(open_own_file(log, os.O_RDONLY), "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(begin if begin <= end else 0, end - 2**20))  # less: a new log was begun
            text = file.read(2**20).decode(errors="replace")
    except EngineUnavailable as error:
        return f"its log cannot be read ({error.message})"
    summary = [s for s in text.splitlines() if s.strip() and not s.startswith((" ", "Traceback"))]
    return " / ".join(summary[-5:]) or "nothing in the log"


def open_log(path: Path) -> int:
    """A descriptor to append to the log, or to a new one: see `LARGEST_LOG`."""
    if path.is_file() and path.stat().st_size > LARGEST_LOG:
        path.replace(path.with_name(path.name + ".1"))
    return open_own_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
