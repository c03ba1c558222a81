"""Few timed passes in processes that tests start, too: Python imports this from `PYTHONPATH`."""

import runpy
import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

FEW = Path(__file__).parents[1] / "few_passes.py"


class Calibration(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> Any:
        if name != "mlx_provider.engine.execution.calibration":
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            few = runpy.run_path(str(FEW))
            vars(module).update(few["FEW"], **dict([few["UNTIMED"][1:]]))

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Calibration())
