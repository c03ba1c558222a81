"""A server of several ranks, through mlx's own launcher, and what each collective takes there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from free_ports import free_ports
from mlx_provider.errors import EngineUnavailable
from mlx_provider_bench.ending import held
from mlx_provider_bench.servers.processes import START_LIMIT, STOP_LIMIT, Kept, Kind, Server, stop

from .tally import Tally

Part = Literal["whole", "apart"]
PROGRAM = str(Path(__file__).with_name("program.py"))
POLL = 0.05


class Group(Kept):
    """A server's ranks; one rank is a process without a launcher. See `program`."""

    stdin = subprocess.PIPE

    def __init__(self, kind: Kind, side: str, ranks: int, part: Part, folder: Path, at: Path):
        """`at`: the path, without a suffix, of its log and its tally."""
        super().__init__(kind, folder, at.with_suffix(".log"))
        self._tally = at.with_suffix(".tally")
        self.tally = Tally(self._tally, create=True)
        self._program = (side, str(self._tally), part)
        self._ranks = ranks

    def command(self) -> list[str]:
        return [*launcher(self._ranks), sys.executable, PROGRAM, *self._program]

    def start(self) -> Server:
        """Return once it answers. Raises `EngineUnavailable` with the log's last lines."""
        server = super().start()
        wake(self.process)
        return server

    def stop(self) -> None:
        if self.process is not None:
            end_group(self.process)


def launcher(ranks: int) -> list[str]:
    """The beginning of a command for so many ranks on this machine."""
    if ranks == 1:
        return []
    found = shutil.which("mlx.launch", path=str(Path(sys.executable).parent))
    found = found or shutil.which("mlx.launch")
    if found is None:
        raise EngineUnavailable("mlx.launch, which comes with mlx, is not on the PATH")
    port = str(free_ports(ranks))
    return [found, "-n", str(ranks), "--backend", "ring", "--starting-port", port, "--"]


def wake(process: subprocess.Popen[bytes] | None) -> None:
    """Let the launcher notice that its ranks take no input; see `program`."""
    if process is None or process.stdin is None:
        return
    try:
        os.write(process.stdin.fileno(), b"\n")
    except BrokenPipeError:  # it has ended, or takes none itself
        return


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a launcher and its ranks, which are of its process group. Idempotent."""
    _signal(process, signal.SIGTERM)
    stop(process)
    deadline = time.monotonic() + STOP_LIMIT
    while _signal(process, 0) and time.monotonic() < deadline:
        time.sleep(POLL)
    _signal(process, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Whether anybody of the group was there."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def time_collectives(
    ranks: int, shapes: Sequence[tuple[list[int], str]], at: Path
) -> list[tuple[float, float]]:
    """Seconds of a sum over so many ranks, by shape: one of many in a graph, and one by itself.

    Raises `EngineUnavailable`.
    """
    path = at.with_suffix(".json")
    command = [*launcher(ranks), sys.executable, PROGRAM, "alone", str(path), "whole"]
    with held():
        process = subprocess.Popen(
            [*command, json.dumps(shapes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_LIMIT
        while process.poll() is None and time.monotonic() < deadline:
            wake(process)  # in vain while a rank still starts
            time.sleep(10 * POLL)
    finally:
        end_group(process)
    if not path.exists():
        raise EngineUnavailable(f"{ranks} ranks cannot add up here")
    return [(chained, single) for chained, single in json.loads(path.read_text())]
