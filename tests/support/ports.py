"""Ports for servers of tests."""

import random
import socket
from contextlib import suppress

PORTS = range(20_000, 32_000)
"""Below the ports that Linux and macOS assign themselves."""


def free_port() -> int:
    """A free loopback port, which the system assigns to no other process until a server listens."""
    for port in random.SystemRandom().choices(PORTS, k=100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")
