"""Lists installed plugins without loading them, hashes their source files, and compares names."""

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, EntryPoint, entry_points
from itertools import islice
from pathlib import Path

from ..hookspecs import PROJECT
from ..records import UpstreamPatch

FIRST_PARTY = "mlx-provider"
"""The distribution whose plugins a third party may replace."""
SELECTION = "MLX_PROVIDER_PLUGINS"
"""Variable that chooses plugins. Unset: all. Empty: none. Else a comma-separated list of names."""
SUFFIXES = (".py", ".jinja", ".jinja2", ".lark", ".metal", ".so", ".dylib")
"""Source files. A plugin may write other files beside these while it runs."""
MAX_FILES = 2000  # of one plugin
_MARKS = re.compile(r"[-_. ]")


@dataclass(frozen=True)
class Plugin:
    """An installed plugin. The fields from `hooks` on are set when it has been loaded."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...] = ()
    records: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of its records by kind (`model family`, `tool parser`, `kernels` ...)."""
    patches: tuple[UpstreamPatch, ...] = ()
    error: str | None = None
    """Why it was left out completely; `None`: it is in use."""
    notes: tuple[str, ...] = ()
    """Later faults and replacements, while the rest of the plugin stays in use."""

    @property
    def key(self) -> str:
        """Distinguishes this plugin from one of another distribution with the same name."""
        return f"{self.distribution}:{self.name}"

    @property
    def built_in(self) -> bool:
        return self.distribution == FIRST_PARTY

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


def find_plugins() -> list[tuple[Plugin, EntryPoint]]:
    """Installed plugins, not loaded yet: built-in ones first, then by distribution and name."""
    read = cache(_read_distribution)  # most plugins are in one distribution
    found = [(Plugin(p.name, *read(p.dist)), p) for p in entry_points(group=PROJECT)]
    return sorted(found, key=lambda p: (not p[0].built_in, p[0].distribution, p[0].name))


def selection(environ: Mapping[str, str]) -> frozenset[str] | None:
    """Names of the plugins that `SELECTION` chooses; `None`: all."""
    given = environ.get(SELECTION)
    if given is None:
        return None
    return frozenset(name.strip() for name in given.split(",") if name.strip())


def _read_distribution(dist: Distribution | None) -> tuple[str, str]:
    """Name and version. Each access to one of them reads the metadata again."""
    if dist is None:
        return "", ""
    metadata = dist.metadata
    name, version = metadata["Name"], metadata["Version"]
    normal = name.lower().replace("_", "-").replace(".", "-")
    return FIRST_PARTY if normal == FIRST_PARTY else name, version


def times(point: EntryPoint) -> dict[str, tuple[int, int]]:
    """Modification time in nanoseconds and size in bytes of each source file."""
    found = {}
    for path in _files(point):
        try:
            state = os.stat(path)  # noqa: PTH116 - a `Path` costs more than the call
        except OSError:
            continue
        found[path] = state.st_mtime_ns, state.st_size
    return found


def digest(point: EntryPoint) -> str:
    """A hash of the source files' paths in their package and content, wherever that is."""
    paths = [*_files(point)]
    root = os.path.commonpath(paths) if paths else ""
    parts = sorted((os.path.relpath(path, root), _hash_content(path)) for path in paths)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _files(point: EntryPoint) -> Iterator[str]:
    """The module of an entry point, or source files of its package. Imports nothing."""
    spec = _package(point.module)
    if spec is None or spec.origin is None:
        return iter(())
    folders = spec.submodule_search_locations
    return islice(_walk(folders), MAX_FILES) if folders else iter((spec.origin,))


def _package(module: str) -> ModuleSpec | None:
    """The outermost package around a module, without namespaces; the module if there is none."""
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


def _walk(roots: list[str]) -> Iterator[str]:
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            for name in names:
                if name.endswith(SUFFIXES) and not name.startswith("."):
                    yield f"{folder}/{name}"


def _hash_content(path: str) -> bytes:
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).digest()
    except OSError:
        return b""


def canonical(name: str) -> str:
    """The common form of `My-Format`, `my_format` and `myformat`."""
    return _MARKS.sub("", name).lower()


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str:
    """A question with at most `most` names of `known` that are similar; empty: none is."""
    spelt: dict[str, str] = {}
    for other in known:
        spelt.setdefault(canonical(other), other)
    similar = [repr(spelt[match]) for match in get_close_matches(canonical(name), spelt, most)]
    return f"did you mean {' or '.join(similar)}?" if similar else ""
