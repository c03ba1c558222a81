"""A `g++` for the kernels that MLX compiles on a CPU, for test processes that run side by side.

They share one folder of libraries, and MLX loads a library as soon as its file exists
(cpu/compiled.cpp, mlx 0.32): while another process still writes it, that is an error or the end of
the process. So each library appears by renaming. The header of all kernels is compiled once: a
kernel then takes a quarter of the time."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

HEADER = "mlx/backend/cpu/compiled_preamble.h"
COMPILER = """#!/bin/sh
PATH=${PATH#*:}
for library; do :; done
[ "$library" = --version ] && exec g++ --version
g++ -I "$(dirname "$0")" "$@" -o "$library.$$" && mv "$library.$$" "$library"
"""


@contextmanager
def compile_whole() -> Iterator[None]:
    """For child processes, too."""
    mlx = find_spec("mlx")
    if mlx is None or shutil.which("g++") is None:
        yield
        return
    include = Path(next(iter(mlx.submodule_search_locations or ()))) / "include"
    with TemporaryDirectory(prefix="mlxg") as folder:
        compiler, compiled = Path(folder) / "g++", Path(folder) / f"{HEADER}.gch"
        compiled.parent.mkdir(parents=True)
        options = f"-std=c++17 -O3 -Wall -fPIC -I {include} -x c++-header -w {include / HEADER}"
        command = f"g++ {options} -o {compiled}.new && mv {compiled}.new {compiled}"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        own = patch.dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}")
        with subprocess.Popen(command, shell=True), own:  # ready before tests are found
            yield
