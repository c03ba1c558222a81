"""Source files of plugins: their times, which show an edit, and a digest of their content."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint
from itertools import islice
from pathlib import Path

SUFFIXES = (".py", ".jinja", ".jinja2", ".lark", ".metal", ".so", ".dylib")
"""A plugin may write other files beside these while it runs."""
MAX_FILES = 2000


def times(point: EntryPoint) -> dict[str, tuple[int, int]]:
    """Modification time in nanoseconds and size in bytes."""
    found = {}
    for path in _files(point):
        try:
            state = os.stat(path)  # noqa: PTH116 - a `Path` costs more than the call
        except OSError:
            continue
        found[path] = state.st_mtime_ns, state.st_size
    return found


def digest(point: EntryPoint) -> str:
    """Independent of the files' location."""
    parts = sorted((Path(path).name, _content(path)) for path in _files(point))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _files(point: EntryPoint) -> Iterator[str]:
    """The module of an entry point, or all files of its package. Imports nothing."""
    spec = _package(point.module)
    if spec is None or spec.origin is None:
        return iter(())
    folders = spec.submodule_search_locations
    return islice(_below(folders), MAX_FILES) if folders else iter((spec.origin,))


def _package(module: str) -> ModuleSpec | None:
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


def _below(roots: list[str]) -> Iterator[str]:
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
            yield from (
                f"{folder}/{name}"
                for name in names
                if name.endswith(SUFFIXES) and not name.startswith(".")
            )


def _content(path: str) -> bytes:
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).digest()
    except OSError:
        return b""
