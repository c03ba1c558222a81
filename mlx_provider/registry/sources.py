"""Source files of plugins as they were when a process began, and what became of them since."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint
from pathlib import Path

from .discovery import installed, selection
from .plugin import Plugin

SUFFIXES = (".py", ".jinja", ".jinja2", ".lark", ".metal", ".so", ".dylib")
"""Files that are source: not what a plugin may write beside itself while it runs."""
MOST = 2000
"""Files of one plugin that are watched."""
LARGEST = 2**22
"""Bytes of a file whose content is compared; of a larger one its time is."""

Seen = tuple[int, int]
"""Time of the last change in nanoseconds, and bytes."""


@dataclass
class Sources:
    """Files by path, as they were first seen. Not for several threads."""

    list_files: Callable[[], Iterator[tuple[str, Seen]]]
    known: dict[str, Seen] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, list_files: Callable[[], Iterator[tuple[str, Seen]]]) -> Sources:
        sources = cls(list_files)
        sources.learn()
        return sources

    def learn(self) -> None:
        """Take in files that are new as they are."""
        for path, seen in self.list_files():
            if path not in self.known:
                self.known[path] = seen
                self.contents[path] = _digest(path, seen)

    def changed(self) -> list[str]:
        """Paths whose content is another, that are new, or gone. One `stat` a file else."""
        found = dict(self.list_files())
        if found == self.known:
            return []
        odd = [path for path, seen in found.items() if self.known.get(path) != seen]
        other = [path for path in odd if _digest(path, found[path]) != self.contents.get(path)]
        self.known.update({path: found[path] for path in odd if path not in other})  # touched only
        return sorted({*other, *(path for path in self.known if path not in found)})

    def digest(self) -> str:
        """Of all files as they were first seen; the same wherever they lie."""
        parts = sorted((Path(path).name, content) for path, content in self.contents.items())
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def watched(environ: Mapping[str, str] = os.environ) -> dict[str, tuple[Plugin, Sources]]:
    """The sources of every plugin that is in use, by its key; imports none of them.

    Ours are left out where they are installed, not worked on.
    """
    wanted = selection(environ)
    found = {}
    for plugin, point in installed():
        if wanted is not None and plugin.name not in wanted:
            continue
        spec = _found(point.module) if plugin.ours else None
        if spec is None or not is_installed(spec.origin or ""):
            found[plugin.key] = plugin, sources_of(point)
    return found


def sources_of(point: EntryPoint) -> Sources:
    """The module of an entry point, or all of the package that it stands in."""
    return Sources.of(lambda: _files(_found(point.module)))


class Beside:
    """Files that this process imported from folders that nothing is installed in."""

    def __init__(self, other_than: Iterable[Sources]) -> None:
        self._others = set[str]().union(*(sources.known for sources in other_than))
        self._paths: set[str] = set()
        self._modules = 0
        self._sources = Sources(self._files)

    def changed(self) -> list[str]:
        """As `Sources.changed`; what was imported meanwhile counts as it is."""
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            self._paths = {path for path in _imported() if path not in self._others}
            self._sources.learn()
        return self._sources.changed()

    def _files(self) -> Iterator[tuple[str, Seen]]:
        for path in self._paths:
            yield from _seen(path)


def is_installed(path: str) -> bool:
    """Whether a file lies where packages are installed to, rather than where they are written."""
    return path.startswith(_FOLDERS)


def _installations() -> tuple[str, ...]:
    own = str(Path(__file__).parents[1])
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    places = {sysconfig.get_path(name) for name in names} | {sys.base_prefix + "/lib"}
    places |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    return tuple(sorted(place + os.sep for place in {*places, own} if place))


_FOLDERS = _installations()


def _imported() -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path is None or not path.endswith(SUFFIXES) or is_installed(path):
            continue
        if not name.startswith(("transformers_modules", "__main__")):  # a checkpoint's own
            yield path


def _found(module: str) -> ModuleSpec | None:
    """The outermost package of a module that has files of its own; imports nothing."""
    first, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    name = first
    for part in rest:
        if spec is None or spec.origin is not None:
            return spec
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec


def _files(spec: ModuleSpec | None) -> Iterator[tuple[str, Seen]]:
    if spec is None or spec.origin is None:
        return
    if not spec.submodule_search_locations:
        yield from _seen(spec.origin)
        return
    count = 0
    for folder in spec.submodule_search_locations:
        for found in _below(folder):
            yield found
            count += 1
            if count == MOST:
                return


def _below(folder: str) -> Iterator[tuple[str, Seen]]:
    todo = [folder]
    while todo:
        try:
            entries = list(os.scandir(todo.pop()))
        except OSError:
            continue
        for entry in entries:
            if entry.name.startswith((".", "__pycache__")):
                continue
            if entry.name.endswith(SUFFIXES):
                yield from _seen(entry.path, entry.stat)
            elif entry.is_dir(follow_symlinks=False):
                todo.append(entry.path)


def _seen(
    path: str, stat: Callable[[], os.stat_result] | None = None
) -> Iterator[tuple[str, Seen]]:
    try:
        # a `Path` would cost more than what it is asked for
        state = os.stat(path) if stat is None else stat()  # noqa: PTH116
    except OSError:
        return
    yield path, (state.st_mtime_ns, state.st_size)


def _digest(path: str, seen: Seen) -> bytes:
    if seen[1] > LARGEST:
        return repr(seen).encode()
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).digest()
    except OSError:
        return b""
