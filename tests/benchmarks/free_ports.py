"""TCP ports for ranks on this machine."""

from __future__ import annotations

import random
import socket

FIRST, LAST = 20_000, 32_000
"""Below the ports that Linux and macOS give to connections and to servers that ask for any port."""


def free_ports(count: int) -> int:
    """The first of `count` ports that follow one another and are free."""
    drawn = random.SystemRandom()  # tests in other processes ask at the same time
    while True:
        first = drawn.randrange(FIRST, LAST - count)
        if all(map(_is_free, range(first, first + count))):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
