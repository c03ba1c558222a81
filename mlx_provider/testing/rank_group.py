"""Rank groups on this machine: processes of mlx's own launcher, joined by a ring over loopback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = "MLX_PROVIDER_TESTING_RANKS"
"""Where ranks leave what they tell."""


def free_ports(count: int) -> int:
    """The first of `count` ports that follow one another and are free."""
    while True:
        with socket.socket() as asked:
            asked.bind(("127.0.0.1", 0))
            first: int = asked.getsockname()[1]
        if first + count < 2**16 and all(map(_is_free, range(first, first + count))):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


def launch(
    script: Path, ranks: int, told: Path, *arguments: str, timeout: float = 1200
) -> list[Any]:
    """Run `script` on every rank; what each has told by `tell`, in order of rank.

    `told`: an empty folder. Raises `RuntimeError` with what the ranks have written where one has
    told nothing.
    """
    launcher = shutil.which("mlx.launch", path=Path(sys.executable).parent) or "mlx.launch"
    ring = ["-n", str(ranks), "--backend", "ring", "--starting-port", str(free_ports(ranks))]
    done = subprocess.run(
        [launcher, *ring, "--", sys.executable, str(script), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {FOLDER: str(told)},
    )
    paths = [told / f"{rank}.json" for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        raise RuntimeError(f"a rank has told nothing:\n{done.stdout}{done.stderr}")
    return [json.loads(path.read_text()) for path in paths]


def tell(rank: int, value: Any) -> None:
    """Leave a JSON value for who has launched the ranks."""
    (Path(os.environ[FOLDER]) / f"{rank}.json").write_text(json.dumps(value))
