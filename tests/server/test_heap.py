"""Freed memory of an engine process on Linux is ready for its next arrays."""

import sys

import pytest

from python_process import run_python

ARRAYS = """
import resource, sys
from mlx_provider.upstream.runtime import configure_heap
if sys.argv[1] == "keep":
    assert configure_heap()
import mlx.core as mx

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def a_long_row():
    mx.eval([mx.ones((1 << 20,)) * i for i in range(1, 25)])

a_long_row()
before = faults()
for _ in range(5):
    a_long_row()
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS keeps freed memory itself")
def test_arrays_as_large_as_freed_ones_cost_no_new_pages() -> None:
    pages = {choice: int(run_python(ARRAYS, choice).stdout) for choice in ("keep", "default")}
    # 5 rows of 24 arrays of 4 MiB are 120 thousand pages
    assert pages["keep"] < 2_000 < 20_000 < pages["default"]


BLOCKS = """
import ctypes, sys
from mlx_provider.upstream.runtime import configure_heap
if sys.argv[1] == "keep":
    assert configure_heap()
libc = ctypes.CDLL(None)

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in
        "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc.malloc.restype, libc.mallinfo.restype = ctypes.c_void_p, Info
blocks = [ctypes.c_void_p(libc.malloc(48)) for _ in range(1000)]
for each in blocks:
    libc.free(each)
print(libc.mallinfo().smblks)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has fast bins")
def test_no_small_free_block_waits_for_a_large_one() -> None:
    found = {choice: int(run_python(BLOCKS, choice).stdout) for choice in ("keep", "default")}
    assert found["keep"] == 0 < 900 < found["default"]
