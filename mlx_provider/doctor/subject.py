"""All input of the checks, so that tests can replace it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..config import EngineSettings, Runtime, engine_settings, runtime
from ..families.checkpoint import read_json
from ..installed import installed_version
from ..registry import PluginRegistry
from ..serving.hub import Outline, full_name, local_folder, outline
from .formats import Formats, formats_of

WIRED = ("sysctl", "-n", "iogpu.wired_limit_mb")
TIME_LIMIT = 5.0


@dataclass(frozen=True)
class System:
    system: str
    """`Darwin`, `Linux` ..."""
    release: str
    """Version of macOS (`15.1`), or of the C library on Linux (`2.39`); empty: unknown."""
    machine: str
    python: str

    @classmethod
    def here(cls) -> System:
        mac = sys.platform == "darwin"
        release = platform.mac_ver()[0] if mac else platform.libc_ver()[1]
        return cls(platform.system(), release, platform.machine(), platform.python_version())

    @property
    def is_mac(self) -> bool:
        return self.system == "Darwin"


def wired_limit() -> int:
    """Mebibytes that the GPU may wire on macOS; 0: the default."""
    answer = subprocess.run(WIRED, capture_output=True, text=True, timeout=TIME_LIMIT, check=True)
    return int(answer.stdout.strip())


@dataclass(frozen=True)
class Subject:
    """This machine, and a model if one is named. Values are read on first use."""

    model: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    home: Path = field(default_factory=Path.home)
    working_folder: Path = Path()
    offline: bool = False
    system: System = field(default_factory=System.here)
    installed: Callable[[str], str | None] = installed_version
    """`None`: not installed."""
    wired: Callable[[], int] = wired_limit
    discover: Callable[[Mapping[str, str]], PluginRegistry] = PluginRegistry.discover

    @cached_property
    def settings(self) -> EngineSettings:
        """Raises `BadRequest` for an invalid variable."""
        return engine_settings(self.environ)

    @property
    def runtime(self) -> Runtime:
        return runtime(self.environ)

    @cached_property
    def registry(self) -> PluginRegistry:
        return self.discover(self.environ)

    @cached_property
    def folder(self) -> Path | None:
        """`None`: the model is not on this machine. Raises `ModelNotFound`, `BadRequest`."""
        return None if self.model is None else local_folder(self.model)

    @cached_property
    def formats(self) -> Formats | None:
        """`None`: the model is not here."""
        return None if self.folder is None else formats_of(self.folder, self.registry)

    @property
    def served_name(self) -> str:
        """The absolute path of a folder."""
        return full_name(self.model or "")

    @cached_property
    def outline(self) -> Outline | None:
        """The Hub's, for a model that is not here; `None`: the Hub must not be asked."""
        away = self.model is not None and self.folder is None
        return outline(str(self.model)) if away and not self.offline else None

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Empty: it may not be read. Raises `BadRequest`."""
        if self.folder is not None:
            return read_json(self.folder / "config.json")
        return {} if self.outline is None else self.outline.config
