"""An optimised BLAS in place of MLX's own, each time in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_provider.upstream import blas

linux = pytest.mark.skipif(sys.platform != "linux", reason="a Mac has Accelerate")
PROGRAM = """
import os, sys
from mlx_provider.upstream.blas import active, preload
before = active()
said = preload(sys.argv[1])
assert said == active()
print(before, said, os.environ.get("OPENBLAS_NUM_THREADS"), sep="|")
"""


def run(choice: str, program: str = PROGRAM, **environment: str) -> list[str]:
    path = {"PYTHONPATH": ":".join(entry for entry in sys.path if entry)}
    result = subprocess.run(
        [sys.executable, "-c", program, choice],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", **path, **environment},
    )
    return (result.stdout or result.stderr).strip().split("|")


@linux
def test_auto_binds_the_first_candidate() -> None:
    first = next((path for path in blas.candidates()), None)
    if first is None:
        pytest.skip("no optimised BLAS is installed here")
    before, said, threads = run("auto")
    assert before.startswith("bundled")
    assert Path(first).name.split(".so")[0] in said
    assert threads == str(blas.cores())


@linux
def test_bundled_loads_nothing() -> None:
    before, said, threads = run("bundled")
    assert before == said
    assert threads == "None"


@linux
def test_the_users_thread_count_is_kept() -> None:
    assert run("auto", OMP_NUM_THREADS="1")[2] == "None"


@linux
@pytest.mark.parametrize("path", ["/nonexistent.so", "libc.so.6"])
def test_a_path_that_does_not_serve_is_named(path: str) -> None:
    [told] = run(path)
    assert "NotInstalled" in told
    assert f"MLX_PROVIDER_BLAS='{path}'" in told


@linux
def test_once_mlx_is_imported_nothing_is_loaded() -> None:
    program = "import sys, types; sys.modules['mlx.core'] = types.ModuleType('x')\n" + PROGRAM
    before, said, _ = run("auto", program)
    assert before == said
