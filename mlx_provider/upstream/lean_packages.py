"""Packages without what they import for scripts: an engine process starts sooner.

Holds for mlx-lm 0.32.2 and mlx-vlm 0.7.10, whose packages import conversion, training and
generation (`mlx_lm/__init__.py`, `mlx_vlm/__init__.py`). The loader of mlx-vlm imports adapters,
whose package imports all of training (`mlx_vlm/trainer/__init__.py`), and requests, to fetch images
(`mlx_vlm/utils.py`). httpx 0.28 imports its command line where rich and click are installed
(`httpx/__init__.py`).
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

PACKAGES = ("mlx_lm", "mlx_vlm", "mlx_vlm.trainer", "requests")  # a parent before its child
COMMAND_LINE = "httpx._main"


def lean_packages() -> None:
    """For a process of our own, before these packages are imported; does nothing afterwards."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name) if name not in sys.modules else None
        if spec is not None:
            sys.modules[name] = LeanPackage(spec)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, sys.modules[name])
    if "httpx" not in sys.modules:
        sys.modules.setdefault(COMMAND_LINE, None)  # type: ignore[arg-type]


class LeanPackage(ModuleType):
    """A package whose modules can be imported; its `__init__` runs once somebody asks for more."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__loader__ = spec, spec.loader
        self.__run = spec.loader.exec_module
        self.__path__ = list(spec.submodule_search_locations)
        self.__package__, self.__file__ = spec.name, spec.origin
        self.__lock, self.__begun = threading.RLock(), False

    def __getattr__(self, name: str) -> Any:
        """Called for what is not there. Raises `AttributeError` where `__init__` has none, too."""
        if not (name.startswith("__") and name.endswith("__")) or name == "__version__":
            with self.__lock:  # who comes second waits for the whole
                if not self.__begun:
                    self.__begun = True
                    self.__run(self)
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
