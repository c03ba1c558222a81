"""What a check reads (`Subject`), and what it finds (`Finding`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from ..config import Runtime, installed_version, runtime
from ..errors import BadRequest
from ..families.tokenizer import HFTokenizer, load_tokenizer
from ..records import LoadOptions
from ..registry import PluginRegistry
from ..serving.hub import Outline, checkpoint, local_folder
from ..settings import EngineSettings, engine_settings

State = Literal["ok", "note", "warn", "fail"]
STATES: tuple[State, ...] = ("fail", "warn", "note", "ok")
"""Worst first. `note`: information; `warn`: works with limits; `fail`: does not work."""
WIRED = ("sysctl", "-n", "iogpu.wired_limit_mb")


@dataclass(frozen=True)
class Finding:
    name: str
    """For programs: `<check>.<part>`. Does not depend on the result."""
    state: State
    what: str
    remedy: str = ""
    """`fail` and `warn` must have one, else `ValueError` is raised."""

    def __post_init__(self) -> None:
        if self.state in ("fail", "warn") and not self.remedy:
            raise ValueError(f"{self.name} complains and names no remedy: {self.what}")

    @classmethod
    def of(cls, name: str, problem: str, right: str, remedy: str, state: State = "fail") -> Finding:
        """A finding of `problem` with remedy and state; if `problem` is empty, `right` is ok."""
        return cls(name, state, problem, remedy) if problem else cls(name, "ok", right)


def wired_limit() -> int:
    """Mebibytes that the GPU may wire on macOS; 0: the system's default."""
    answer = subprocess.run(WIRED, capture_output=True, text=True, timeout=5, check=True)
    return int(answer.stdout.strip())


@dataclass(frozen=True)
class Subject:
    """This machine, and a model if one is named. All but `runtime` is read once, on first use."""

    model: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    home: Path = field(default_factory=Path.home)
    working_folder: Path = Path()
    is_mac: bool = sys.platform == "darwin"
    installed: Callable[[str], str | None] = installed_version
    wired: Callable[[], int] = wired_limit
    discover: Callable[[Mapping[str, str]], PluginRegistry] = PluginRegistry.discover

    @cached_property
    def settings(self) -> EngineSettings:
        """Raises `BadRequest` for a wrong variable."""
        return engine_settings(self.environ)

    @property
    def runtime(self) -> Runtime:
        return runtime(self.environ)

    @cached_property
    def registry(self) -> PluginRegistry:
        return self.discover(self.environ)

    @cached_property
    def folder(self) -> Path | None:
        """`None`: no model is named, or it is not here. Raises `ModelNotFound`, `BadRequest`."""
        return None if self.model is None else local_folder(self.model)

    @cached_property
    def tokenizer(self) -> HFTokenizer | None:
        """`None`: no `folder`, or no chat template. Raises the errors of `load_tokenizer`."""
        found = load_tokenizer(self.folder, LoadOptions()) if self.folder else None
        return found if found is not None and found.chat_template is not None else None

    @cached_property
    def checkpoint(self) -> Outline:
        """Config and size, from the Hub if it is not here. Raises `ModelNotFound`, `BadRequest`."""
        if self.model is None:
            raise BadRequest("no model is named")
        return checkpoint(self.model)
