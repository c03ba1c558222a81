"""The handler's module stays light: a gateway worker must not load MLX."""

import subprocess
import sys

HEAVY = ("mlx", "mlx_lm", "mlx_vlm", "transformers")

CODE = f"""
import sys
import litellm
before = set(sys.modules)
import mlx_provider.litellm
print(sorted(set({HEAVY!r}) & (set(sys.modules) - before)))
"""


def test_the_handler_imports_no_engine():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
