"""An optimised BLAS in place of MLX's own, each time in a fresh process."""

import sys
from pathlib import Path

import pytest

from mlx_provider.cores import cores
from mlx_provider.upstream import runtime
from python_process import run_python

linux = pytest.mark.skipif(sys.platform != "linux", reason="a Mac has Accelerate")
PROGRAM = """
import os
from mlx_provider.upstream.runtime import active_blas, preload_blas
before = active_blas()
said = preload_blas()
assert said == active_blas()
print(before, said, os.environ.get("OPENBLAS_NUM_THREADS"), sep="|")
"""


def run(program: str = PROGRAM, **environment: str) -> list[str]:
    path = {"PYTHONPATH": ":".join(entry for entry in sys.path if entry)}
    result = run_python(program, env={"PATH": "/usr/bin:/bin", **path, **environment})
    return result.stdout.strip().split("|")


@linux
def test_the_first_optimised_blas_replaces_the_bundled_one() -> None:
    first = next((path for path in runtime._candidates()), None)
    if first is None:
        pytest.skip("no optimised BLAS is installed here")
    before, said, threads = run()
    assert before.startswith("bundled")
    assert Path(first).name.split(".so")[0] in said
    assert threads == str(cores())


@linux
def test_the_users_thread_count_is_kept() -> None:
    assert run(OMP_NUM_THREADS="1")[2] == "None"


@linux
def test_no_blas_is_loaded_after_mlx_was_imported() -> None:
    program = "import sys, types; sys.modules['mlx.core'] = types.ModuleType('x')\n" + PROGRAM
    before, said, _ = run(program)
    assert before == said
