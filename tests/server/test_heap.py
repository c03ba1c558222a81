"""Freed arrays stay with an engine process on Linux: their pages are not paid for again."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from mlx_provider.upstream.heap import keep_freed
if sys.argv[1] == "keep":
    assert keep_freed()
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
    pages = {}
    for choice in ("keep", "default"):
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, choice], capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        pages[choice] = int(result.stdout)
    # 5 rows of 24 arrays of 4 MiB are 120 thousand pages
    assert pages["keep"] < 2_000 < 20_000 < pages["default"]
