"""Launches a group of ranks by `mlx.launch`, with the environment for remote ranks."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mlx_provider.errors import BadRequest, NotInstalled
from mlx_provider.replicas import PREFIX

from .messages import RankFault

RANK_COMMAND = (sys.executable, "-P", "-m", "mlx_provider_ranks.process")
LAUNCH_COMMAND = (sys.executable, "-P", "-m", "mlx_provider.upstream.launch")
OF_A_MACHINE = frozenset(
    PREFIX + name
    for name in (
        "API_KEY", "DISK_CACHE", "IDLE_TIMEOUT", "MODELS_FILE", "MODEL_ROOTS", "RUNTIME_DIR",
        "TRANSPORT",
    )
)  # fmt: skip
"""Variables that are secret, or hold paths: each machine has its own."""
OF_A_LAUNCHER = (
    "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_JACCL_RING", "MLX_RANK",
    "MLX_WORLD_SIZE", "NCCL_HOST_IP", "NCCL_PORT",
)  # fmt: skip
"""Variables by which a rank would take itself for one of another group (mlx 0.32, launch.py)."""
LOCAL = "127.0.0.1"
LOWEST_PORT, HIGHEST_PORT = 20_000, 32_000
"""Below the ports that systems give to clients."""
ATTEMPTS = 200


@dataclass(frozen=True)
class GroupOptions:
    """The ranks of a group: either `ranks` on this machine, or a `hostfile` of mlx."""

    ranks: int | None = None
    hostfile: Path | None = None
    backend: str | None = None
    """`None`: from the hostfile, or `ring`."""
    starting_port: int | None = None
    """First port of the links; `None`: free ports on this machine, mlx's default on others."""

    def check(self) -> None:
        """Raises `BadRequest` that names the option."""
        if (self.ranks is None) == (self.hostfile is None):
            raise BadRequest("--ranks or --hostfile: one of them", param="ranks")
        if self.ranks is not None and self.ranks < 2:
            raise BadRequest("--ranks: a group has two at least", param="ranks")
        if self.hostfile is not None:
            _hosts(self.hostfile)


def launcher() -> tuple[str, ...]:
    """`mlx.launch` of the installed mlx. Raises `NotInstalled`."""
    found = Path(sys.executable).parent / "mlx.launch"
    if not found.exists():
        raise NotInstalled(
            f"{found} is missing, which comes with mlx: install mlx for {sys.executable}"
        )
    return LAUNCH_COMMAND


def launch_command(
    options: GroupOptions,
    serve: Sequence[str],
    fault: RankFault | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """The command line, without secrets. `fault`: of the group before this one."""
    command = [*launcher(), *_where(options)]
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in OF_A_MACHINE:
            command += ["--env", f"{name}={environ[name]}"]
    last_fault = ["--last-fault", fault.model_dump_json()] if fault is not None else []
    return [*command, "--", *RANK_COMMAND, *last_fault, *serve]


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of the launcher. Ranks on this machine inherit it, with the key."""
    return {name: value for name, value in environ.items() if name not in OF_A_LAUNCHER}


def _where(options: GroupOptions) -> list[str]:
    port = options.starting_port
    if options.hostfile is not None:
        where = ["--hostfile", str(options.hostfile)]
        backend = options.backend or _backend(options.hostfile)
    else:
        count = options.ranks or 0
        where = ["--hosts", LOCAL, "-n", str(count)]
        backend = options.backend or "ring"
        port = _free_ports(count) if port is None else port
    return [*where, "--backend", backend, *(["--starting-port", str(port)] if port else [])]


def _hosts(hostfile: Path) -> tuple[list[object], str]:
    """Hosts and backend, read as in mlx (0.32, `_distributed_utils/common.py`)."""
    try:
        found = json.loads(hostfile.read_text())
        hosts = found["hosts"] if isinstance(found, dict) else found
        backend = found.get("backend", "") if isinstance(found, dict) else ""
        names = [host["ssh"] for host in hosts]
    except (OSError, ValueError, KeyError, TypeError) as error:
        summary = f"--hostfile {hostfile}: {error}; `mlx.distributed_config` writes one"
        raise BadRequest(summary, param="hostfile") from None
    if len(names) < 2:
        raise BadRequest(f"--hostfile {hostfile}: a group has two ranks at least", param="hostfile")
    return names, backend


def _backend(hostfile: Path) -> str:
    return _hosts(hostfile)[1] or "ring"


def _free_ports(count: int) -> int:
    """The first of `count` consecutive free ports."""
    first = LOWEST_PORT + os.getpid() % (HIGHEST_PORT - LOWEST_PORT)
    for attempt in range(ATTEMPTS):
        span = HIGHEST_PORT - LOWEST_PORT - count
        port = LOWEST_PORT + (first - LOWEST_PORT + attempt * (count + 7)) % span
        if _are_free(range(port, port + count)):
            return port
    raise BadRequest("no ports are free: name one with --starting-port", param="starting_port")


def _are_free(ports: range) -> bool:
    with ExitStack() as held:
        for port in ports:
            try:
                held.enter_context(socket.create_server((LOCAL, port)))
            except OSError:
                return False
        return True
