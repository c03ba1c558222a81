"""Bodies whose length nobody announces, beside others that are large."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlx_provider.byte_gate import ByteGate
from mlx_provider.errors import BodyTooLarge
from mlx_provider.server.body import SMALL, Bodies

LIMIT = 16 * SMALL
SECONDS = 30


class Sender:
    """A client's body: the test hands out its pieces."""

    def __init__(self, bodies: Bodies, length: int | None = None) -> None:
        headers = [] if length is None else [(b"content-length", str(length).encode())]
        self._pieces: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self.taken = 0
        self.body = asyncio.ensure_future(
            bodies.read({"type": "http", "headers": headers}, self._receive)
        )

    async def _receive(self) -> dict[str, Any]:
        piece, more = await self._pieces.get()
        self.taken += 1
        return {"type": "http.request", "body": piece, "more_body": more}

    def send(self, size: int, *, more: bool = True) -> None:
        self._pieces.put_nowait((b" " * size, more))

    async def settle(self) -> None:
        """Until it waits for bytes, for room, or no more."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def whole(self) -> int:
        async with asyncio.timeout(SECONDS):
            body = await self.body
        body.ticket.close()
        return len(body.data)


def held(bodies: Bodies) -> int:
    return bodies._large.held


async def test_a_chunked_body_leaves_room_for_a_large_one() -> None:
    bodies = Bodies(LIMIT)
    chunked = Sender(bodies)
    chunked.send(2 * SMALL)
    await chunked.settle()
    assert held(bodies) == 4 * SMALL
    announced = Sender(bodies, 12 * SMALL)
    announced.send(12 * SMALL, more=False)
    assert await announced.whole() == 12 * SMALL
    chunked.send(0, more=False)
    assert await chunked.whole() == 2 * SMALL
    assert held(bodies) == bodies._small.held == 0


async def test_a_small_chunked_body_waits_for_no_large_one() -> None:
    bodies = Bodies(LIMIT)
    holder = Sender(bodies, LIMIT)
    await holder.settle()
    chunked = Sender(bodies)
    chunked.send(SMALL, more=False)
    assert await chunked.whole() == SMALL
    holder.body.cancel()


async def test_bodies_that_grow_never_wait_for_each_other() -> None:
    """Nor for one in the line that needs what they hold."""
    bodies = Bodies(LIMIT)
    growing = [Sender(bodies) for _ in range(4)]
    for each in growing:
        each.send(3 * SMALL)
        await each.settle()
    large = Sender(bodies, LIMIT - SMALL)
    large.send(LIMIT - SMALL, more=False)
    for each in growing:
        each.send(LIMIT - 4 * SMALL)
        each.send(SMALL, more=False)
    sizes = await asyncio.gather(large.whole(), *(each.whole() for each in growing))
    assert sizes == [LIMIT - SMALL, *[LIMIT] * 4]
    assert held(bodies) == bodies._small.held == 0


@pytest.mark.parametrize("size", [2 * SMALL, 9 * SMALL])
async def test_a_client_that_leaves_gives_everything_back(size: int) -> None:
    bodies = Bodies(LIMIT)
    for _ in range(3):
        sender = Sender(bodies)
        sender.send(size)
        await sender.settle()
        sender.body.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sender.body
        assert held(bodies) == bodies._small.held == 0


async def test_more_than_the_limit_is_refused_and_given_back() -> None:
    bodies = Bodies(LIMIT)
    sender = Sender(bodies)
    sender.send(LIMIT)
    sender.send(1, more=False)
    with pytest.raises(BodyTooLarge):
        await sender.whole()
    assert held(bodies) == bodies._small.held == 0


def test_who_stands_first_is_granted_first() -> None:
    gate = ByteGate(10)
    holder, last = gate.ask(8), gate.ask(5)
    first = gate.ask(4, first=True)
    holder.keep(6)
    assert (first.granted.done(), last.granted.done()) == (True, False)
    holder.absorb(first)
    assert (holder.charged, first.charged, gate.held) == (10, 0, 10)
    first.close()
    holder.close()
    assert last.granted.done()
    last.close()
    assert gate.held == 0
