"""Detects changes on disk since the engine process started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

from ..installed import installed_version
from ..registry import Plugin
from ..registry.discovery import installed, selection
from ..registry.sources import times

OWN = "mlx-provider"
PACKAGES = (OWN, "mlx", "mlx-lm", "mlx-vlm", "transformers")
TOLD = 5


class OutOfDate:
    """Created before the plugins are imported. Used in the event loop: a check costs a `stat` of
    each watched file and import folder."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = dict(environ)
        self._folders = _folders()
        self._began = self._installed({})
        self._now = self._began
        self._points = self._in_use()
        self._times = [times(point) for _, point in self._points]

    def changes(self) -> list[str]:
        """Empty if a new engine would be the same."""
        folders = _folders()
        if folders != self._folders:
            self._folders, self._now = folders, self._installed(self._began)
        return [*self._differ(), *self._edited()]

    def replaceable(self, changes: list[str]) -> bool:
        """Whether a new engine could serve the present clients. Not one of another version: the
        clients have this version until they restart."""
        return bool(changes) and self._now.get(OWN) == self._began.get(OWN)

    def _differ(self) -> Iterator[str]:
        for name in sorted({*self._began, *self._now}):
            then, now = self._began.get(name), self._now.get(name)
            if then != now:
                yield f"{name}: {then or 'none'}, now {now or 'none'}"

    def _edited(self) -> Iterator[str]:
        for (plugin, point), then in zip(self._points, self._times, strict=True):
            now = times(point)
            if now != then:
                changed = sorted(path for path, _ in now.items() ^ then.items())
                yield f"plugin {plugin.name}: edited {_files([*dict.fromkeys(changed)])}"

    def _in_use(self) -> list[tuple[Plugin, EntryPoint]]:
        """Third-party plugins; built-in ones change with the version of this package."""
        wanted = selection(self._environ)
        return [
            (plugin, point)
            for plugin, point in installed()
            if not plugin.ours and (wanted is None or plugin.name in wanted)
        ]

    def _installed(self, before: Mapping[str, str]) -> dict[str, str]:
        found = {
            f"plugin {plugin.name}": f"{plugin.distribution} {plugin.version}"
            for plugin, _ in self._in_use()
        }
        for name in PACKAGES:
            if number := installed_version(name) or before.get(name):  # pip is replacing it
                found[name] = number
        return found


def _folders() -> dict[str, int]:
    found = {}
    for path in sys.path:
        try:
            found[path] = os.stat(path).st_mtime_ns  # noqa: PTH116 - for each request
        except OSError:
            continue
    return found


def _files(paths: list[str]) -> str:
    """Names without folders, which only the owner may see."""
    names = [f"{Path(path).parent.name}/{Path(path).name}" for path in paths]
    more = len(names) - TOLD
    return ", ".join(names[:TOLD]) + (f" and {more} more" if more > 0 else "")
