"""A faster start of an engine process: imports modules of packages without their `__init__`.

mlx-lm 0.32.2 and mlx-vlm 0.7.10 import conversion, training and generation (`mlx_lm/__init__.py`,
`mlx_vlm/__init__.py`); the loader of mlx-vlm (`mlx_vlm/utils.py`) also adapters, with all of
training (`mlx_vlm/trainer/__init__.py`), and requests. transformers 5.23 reads the source of all
its models to list their names, and again for its subpackage (`transformers/models/__init__.py`).
httpx 0.28 imports its command line if rich and click are installed (`httpx/__init__.py`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PACKAGES = frozenset({"mlx_lm", "mlx_vlm", "mlx_vlm.trainer", "requests", "transformers.models"})
COMMAND_LINE = "httpx._main"


def lean_packages() -> None:
    """Those already imported stay."""
    if not any(isinstance(finder, LeanFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, LeanFinder())
    if "httpx" not in sys.modules:
        sys.modules.setdefault(COMMAND_LINE, None)  # type: ignore[arg-type]


class LeanFinder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in PACKAGES else None
        if spec is not None and spec.loader is not None:
            spec.loader = LeanLoader(spec.loader)
        return spec


class LeanLoader(Loader):
    def __init__(self, whole: Loader) -> None:
        self._whole = whole

    def create_module(self, spec: ModuleSpec) -> LeanPackage:
        return LeanPackage(spec.name, self._whole.exec_module)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._whole
        if module.__spec__ is not None:
            module.__spec__.loader = self._whole


class LeanPackage(ModuleType):
    """A package whose `__init__` runs at the first access to an attribute that is not a module."""

    def __init__(self, name: str, run: Callable[[ModuleType], object]) -> None:
        super().__init__(name)
        self.__run = run
        self.__lock, self.__begun = threading.RLock(), False

    def __getattr__(self, name: str) -> Any:
        """Raises `AttributeError` if `__init__` does not set it."""
        if not (name.startswith("__") and name.endswith("__")) or name == "__version__":
            with self.__lock:  # a second thread waits until `__init__` is complete
                if not self.__begun:
                    self.__begun = True
                    self.__run(self)
            if name in self.__dict__:
                return self.__dict__[name]
            other = sys.modules.get(self.__name__, self)  # `__init__` can replace the module
            if other is not self:
                return getattr(other, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
