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
names = ("OPENBLAS_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT")
print(before, said, *map(os.environ.get, names), sep="|")
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
    before, said, threads, spins = run()
    assert before.startswith("bundled")
    assert Path(first).name.split(".so")[0] in said
    assert (threads, spins) == (str(cores()), "20")


@linux
def test_openblas_has_kernels_of_this_processor_although_that_may_be_newer() -> None:
    program = PROGRAM + "\nimport ctypes; " + runtime.CORE_NAME.replace("sys.argv[1]", "None")
    found = run(program)[-1] if "OpenBLAS" in run()[1] else ""
    assert not (found.endswith("Prescott") and "avx2" in Path("/proc/cpuinfo").read_text())


@linux
def test_what_the_user_has_set_is_kept() -> None:
    assert run(OMP_NUM_THREADS="1", OPENBLAS_THREAD_TIMEOUT="26")[2:] == ["None", "26"]


@linux
def test_no_blas_is_loaded_after_mlx_was_imported() -> None:
    program = "import sys, types; sys.modules['mlx.core'] = types.ModuleType('x')\n" + PROGRAM
    before, said, *_ = run(program)
    assert before == said
