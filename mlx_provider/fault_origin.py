"""Finds the plugin that caused an error, from the traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import FrameType

CORE = __name__.partition(".")[0]
"""Our package, and the group of plugins' entry points."""
MACHINE = (OSError, MemoryError)
DEVICE = ("[metal", "[malloc", "[cuda", "out of memory", "insufficient memory")
"""Parts of MLX's messages about the device."""


@dataclass(frozen=True)
class FaultOrigin:
    """A plugin, and the line of its code that raised, or called what raised."""

    plugin: str
    distribution: str
    called: str
    """Its function that was called: a hook, or a function of a record or a loaded model."""
    file: str
    """Path from the folder of its package."""
    line: int
    function: str
    innermost: bool
    """Whether this code has not called the core."""

    @property
    def ours(self) -> bool:
        return self.distribution.partition(" ")[0].replace("-", "_") == CORE

    @property
    def where(self) -> str:
        return f"{self.file}, line {self.line}, in {self.function}"

    def __str__(self) -> str:
        return f"plugin {self.plugin} ({self.distribution})"


def fault_origin(error: BaseException) -> FaultOrigin | None:
    """Prefers a third party's plugin to a built-in one."""
    frames = [frame for frame in _frames(error) if _may_be_a_plugins(frame[0])]
    if all(_below(_module(frame), CORE) for frame, _ in frames):
        return None
    points = [(_root(point.module), point) for point in _points(_folders())]
    owned = [
        (point, frame, line)
        for frame, line in frames
        if (point := _owner(_module(frame), points)) is not None
    ]
    chosen = [each for each in owned if not _is_ours(each[0])] or owned
    if not chosen:
        return None
    point, frame, line = chosen[-1]
    mine = [own for each, own, _ in chosen if each == point]
    return FaultOrigin(
        point.name,
        "" if point.dist is None else f"{point.dist.name} {point.dist.version}",
        _name(mine[0]),
        _shown(frame),
        line,
        _name(frame),
        innermost=not any(_below(_module(each), CORE) for each, _ in _after(frames, frame)),
    )


def of_the_machine(error: BaseException) -> bool:
    """Whether files, network, memory or device are the cause, so that a retry can succeed."""
    text = str(error).lower()
    return isinstance(error, MACHINE) or any(each in text for each in DEVICE)


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """From the outermost call to the one that failed."""
    entry = error.__traceback__
    while entry is not None:
        yield entry.tb_frame, entry.tb_lineno
        entry = entry.tb_next


def _after(
    frames: Sequence[tuple[FrameType, int]], last: FrameType
) -> Sequence[tuple[FrameType, int]]:
    return frames[1 + max(i for i, (frame, _) in enumerate(frames) if frame is last) :]


def _may_be_a_plugins(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] not in {*sys.stdlib_module_names, "", "pluggy"}


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _name(frame: FrameType) -> str:
    return frame.f_code.co_qualname.replace("<locals>.", "")


@lru_cache(maxsize=1)
def _points(folders: tuple[tuple[str, int], ...]) -> Sequence[EntryPoint]:
    """Read once (10 ms) for each state of these folders."""
    return tuple(entry_points(group=CORE))


def _folders() -> tuple[tuple[str, int], ...]:
    found = []
    for path in sys.path:
        with suppress(OSError):
            found.append((path, Path(path).stat().st_mtime_ns))
    return tuple(found)


def _root(module: str) -> str:
    """The outermost package that is not shared with other distributions."""
    parts = module.split(".")
    for count in range(1, len(parts)):
        name = ".".join(parts[:count])
        if getattr(sys.modules.get(name), "__file__", None):
            return name
    return module


def _owner(module: str, points: Iterable[tuple[str, EntryPoint]]) -> EntryPoint | None:
    return next((point for root, point in points if _below(module, root)), None)


def _is_ours(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name.replace("-", "_") == CORE


def _below(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _shown(frame: FrameType) -> str:
    """The path from its outermost package."""
    path = Path(frame.f_code.co_filename)
    depth = _module(frame).count(".") + (path.name == "__init__.py")
    return "/".join(path.parts[-1 - depth :])
