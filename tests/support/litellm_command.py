"""`litellm`, as a user has installed it."""

import shlex
import sys
from pathlib import Path

CODE = """
import gc
gc.disable()  # a fifth of the time of the imports
import litellm.proxy.proxy_server
gc.enable()
from litellm.proxy.proxy_cli import run_server
run_server()
"""


def write_litellm(folder: Path) -> Path:
    """The command, which leaves its key in the folder where it starts. Returns what to put on
    `PATH`."""
    command = folder / "bin" / "litellm"
    command.parent.mkdir()
    run = f'exec {shlex.quote(sys.executable)} -P -c {shlex.quote(CODE)} "$@"'
    command.write_text(f'#!/bin/sh\nprintf %s "$LITELLM_MASTER_KEY" > key\n{run}\n')
    command.chmod(0o755)
    return command.parent
