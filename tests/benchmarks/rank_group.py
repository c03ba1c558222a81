"""Rank groups on this machine: processes of mlx's own launcher, joined by a ring over loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from free_ports import free_ports
from mlx_provider_ranks.launching import LAUNCH_COMMAND

FOLDER = "RANKS_TESTED_IN"
"""Where ranks leave what they tell."""


def launch(
    script: Path, ranks: int, told: Path, *arguments: str, timeout: float = 1200
) -> list[Any]:
    """Run `script` on every rank; what each has told by `tell`, in order of rank.

    `told`: an empty folder. Raises `RuntimeError` with what the ranks have written where one has
    told nothing.
    """
    ring = ["-n", str(ranks), "--backend", "ring", "--starting-port", str(free_ports(ranks))]
    command = [*LAUNCH_COMMAND, *ring, "--", sys.executable, str(script), *arguments]
    output = _output(command, told, timeout)
    paths = [told / f"{rank}.json" for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        raise RuntimeError(f"a rank has told nothing:\n{output}")
    return [json.loads(path.read_text()) for path in paths]


def environment(told: Path) -> dict[str, str]:
    """Variables of a script on a rank: it finds `told`, and the modules beside this one."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | {FOLDER: str(told), "PYTHONPATH": path}


def _output(command: Sequence[str], told: Path, timeout: float) -> str:
    """What the launcher and its ranks have written by their end, or until they were killed."""
    environ = environment(told)
    with (
        (told / "output").open("w+b") as output,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environ,
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:  # its input stays open: it asks without a pause for one that has ended
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        return output.read().decode(errors="replace")


def tell(rank: int, value: Any) -> None:
    """Leave a JSON value for who has launched the ranks."""
    (Path(os.environ[FOLDER]) / f"{rank}.json").write_text(json.dumps(value))
