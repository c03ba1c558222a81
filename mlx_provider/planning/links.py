"""What joins machines: how long a collective takes. Each figure says where it is from."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BadRequest
from . import units


@dataclass(frozen=True)
class Link:
    """A backend of `mlx.launch` over some cable."""

    name: str
    seconds: float
    """Of a collective of two ranks with hardly any bytes."""
    bytes: float
    """A second and cable, one way."""
    mesh: bool
    """Each rank reaches every other one by a cable of its own; else they stand in a ring."""
    basis: str

    def collective(self, ranks: int, payload: float) -> float:
        """Seconds of an all-sum of `payload` bytes over `ranks`.

        A ring passes parts on 2 (n - 1) times; a mesh sends all to everybody at once (mlx 0.32,
        `distributed/ring` and `distributed/jaccl`).
        """
        if ranks == 1:
            return 0.0
        if self.mesh:
            return self.seconds + payload / self.bytes
        hops = ranks - 1
        return hops * self.seconds + self.sent(ranks, payload) / self.bytes

    def gathered(self, ranks: int, payload: float) -> float:
        """Seconds until each of `ranks` has the `payload` bytes of every other one."""
        hops = 1 if self.mesh else ranks - 1
        return hops * (self.seconds + payload / self.bytes)

    def sent(self, ranks: int, payload: float) -> float:
        """Bytes that each rank sends for an all-sum."""
        return (ranks - 1) * payload * (1.0 if self.mesh else 2 / ranks)


_JACCL = (
    "27 to 31 µs and 6.1 to 6.5 GB/s between an M3 Ultra and an M5 Max over Thunderbolt 5 "
    "(jundot/omlx, pull request 3118)"
)
_RING = (
    "0.38 to 0.95 ms there and back over Thunderbolt's bridge (exo-explore/exo, issue 2295); "
    "bandwidth assumed"
)
_ETHERNET = "bandwidth by its standard; latency assumed to be that of TCP over Thunderbolt"
_LOOPBACK = "6 ms and, under load, 0.16 GB/s between two processes of one Linux machine of 2 cores"
LINKS = {
    link.name: link
    for link in (
        Link("jaccl", 30e-6, 6.3e9, mesh=True, basis=_JACCL),
        Link("ring-thunderbolt", 0.65e-3, 2e9, mesh=False, basis=_RING),
        Link("ring-10gbe", 0.65e-3, 1.25e9, mesh=False, basis=_ETHERNET),
        Link("loopback", 6e-3, 0.16e9, mesh=False, basis=_LOOPBACK),
    )
}


def link(text: str) -> Link:
    """One of `LINKS` by name, or a ring of `LATENCY:BANDWIDTH`. Raises `BadRequest`."""
    if text in LINKS:
        return LINKS[text]
    latency, colon, bandwidth = text.partition(":")
    if not colon:
        known = ", ".join(LINKS)
        raise BadRequest(
            f"{text!r} is no known link: {known}, or latency and bandwidth (`100us:5GB/s`)",
            param="link",
        )
    took = units.positive(units.seconds(latency), latency, "time, such as `100us`", "link")
    moved = units.positive(units.rate(bandwidth), bandwidth, "rate, such as `5GB/s`", "link")
    return Link(text, took, moved, mesh=False, basis="as given, as a ring")
