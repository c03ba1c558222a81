"""A program of Python in a process of its own."""

import subprocess
import sys
from collections.abc import Mapping


def run_python(
    code: str, *arguments: object, status: int = 0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, which must have that exit status."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done
