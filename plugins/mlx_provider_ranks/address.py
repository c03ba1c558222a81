"""How followers get the address of the leader and the key for it."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_provider.errors import BadRequest

KEY_BYTES = 32
ROOM = 2048
"""Bytes that are spread: addresses, port and key, as JSON."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Meeting:
    """The addresses of the leader, which are tried in order, and the key that admits a rank."""

    hosts: tuple[str, ...]
    port: int
    key: str

    def encoded(self) -> bytes:
        return json.dumps([list(self.hosts), self.port, self.key]).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Meeting:
        hosts, port, key = json.loads(data)
        return cls(tuple(hosts), port, key)


def new_key() -> str:
    return secrets.token_hex(KEY_BYTES)


def leader_hosts(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Addresses of rank 0 from the launcher, most likely first.

    `mlx.launch` (mlx 0.32, `_distributed_utils/launch.py`) gives every rank of a ring a file with
    one list of `ip:port` for each rank, and ranks of JACCL the address of the coordinator, rank
    0. Links of a ring can connect only neighbours, so the host's name comes last. Only loopback, if
    all ranks are on this machine.
    """
    ranks = _ring(environ.get("MLX_HOSTFILE"))
    if ranks and all(_is_loopback(ip) for ips in ranks for ip in ips):
        return (LOOPBACK,)
    if ranks:
        return tuple(dict.fromkeys([*ranks[0], socket.gethostname()]))
    if coordinator := environ.get("MLX_JACCL_COORDINATOR"):
        ip = _ip(coordinator)
        return (ip,) if _is_loopback(ip) else (ip, socket.gethostname())
    return (socket.gethostname(),)


def bind_host(hosts: tuple[str, ...]) -> str:
    """Loopback if all ranks are on this machine; otherwise every interface."""
    return LOOPBACK if all(_is_loopback(host) for host in hosts) else ""


def spread(group: Any, meeting: Meeting | None) -> Meeting:
    """All ranks get the value of rank 0, by a sum to which the others add zeros.

    A collective of the group: every rank must call it at the same point.
    """
    import mlx.core as mx
    import numpy as np

    data = meeting.encoded() if meeting is not None else b""
    if len(data) > ROOM:
        raise BadRequest(f"the addresses of rank 0 take {len(data)} bytes; {ROOM} at most")
    padded = mx.array([len(data), *data, *bytes(ROOM - len(data))], dtype=mx.int32)
    summed = np.array(mx.distributed.all_sum(padded, group=group)).tolist()
    return Meeting.decoded(bytes(summed[1 : summed[0] + 1]))


def _ring(path: str | None) -> list[list[str]]:
    if not path:
        return []
    try:
        text = Path(path).read_text()
        ranks = json.loads(text) if text.strip() else []
        return [
            [_ip(each) for each in ([rank] if isinstance(rank, str) else rank)] for rank in ranks
        ]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadRequest(f"MLX_HOSTFILE={path}: {error}") from None


def _ip(address: str) -> str:
    return address.rpartition(":")[0].strip("[]") or address


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
