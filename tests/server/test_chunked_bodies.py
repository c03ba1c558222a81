"""Bodies that arrive in pieces, beside others that are large, half-sent, or of other keys."""

import asyncio
from typing import Any

import pytest

from mlx_provider.byte_gate import ByteGate
from mlx_provider.errors import BodyTooLarge
from mlx_provider.server.access import SCOPE_KEY, Key
from mlx_provider.server.incoming import SMALL, Bodies

LIMIT = 16 * SMALL
SECONDS = 300


class Sender:
    """A client's body: the test hands out its pieces."""

    def __init__(self, bodies: Bodies, length: int | None = None, key: str | None = None) -> None:
        headers = [] if length is None else [(b"content-length", str(length).encode())]
        self._pieces: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self.taken = 0
        scope = {"type": "http", "headers": headers, SCOPE_KEY: Key("", key)}
        self.body = asyncio.ensure_future(bodies.read(scope, self._receive))

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
    return bodies.large.nbytes


async def test_a_chunked_body_leaves_room_for_a_large_one() -> None:
    bodies = Bodies(LIMIT)
    chunked = Sender(bodies)
    chunked.send(2 * SMALL)
    await chunked.settle()
    assert held(bodies) == 2 * SMALL
    announced = Sender(bodies, 12 * SMALL)
    announced.send(12 * SMALL, more=False)
    assert await announced.whole() == 12 * SMALL
    chunked.send(0, more=False)
    assert await chunked.whole() == 2 * SMALL
    assert held(bodies) == bodies.small.nbytes == 0


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
    for sender in growing:
        sender.send(3 * SMALL)
        await sender.settle()
    large = Sender(bodies, LIMIT - SMALL)
    large.send(LIMIT - SMALL, more=False)
    for sender in growing:
        sender.send(LIMIT - 4 * SMALL)
        sender.send(SMALL, more=False)
    sizes = await asyncio.gather(large.whole(), *(sender.whole() for sender in growing))
    assert sizes == [LIMIT - SMALL, *[LIMIT] * 4]
    assert held(bodies) == bodies.small.nbytes == 0


@pytest.mark.parametrize("size", [2 * SMALL, 9 * SMALL])
async def test_a_disconnected_sender_releases_all_reserved_bytes(size: int) -> None:
    bodies = Bodies(LIMIT)
    for _ in range(3):
        sender = Sender(bodies)
        sender.send(size)
        await sender.settle()
        sender.body.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sender.body
        assert held(bodies) == bodies.small.nbytes == 0


async def test_a_chunked_body_above_the_limit_is_refused_and_released() -> None:
    bodies = Bodies(LIMIT)
    sender = Sender(bodies)
    sender.send(LIMIT)
    sender.send(1, more=False)
    with pytest.raises(BodyTooLarge):
        await sender.whole()
    assert held(bodies) == bodies.small.nbytes == 0


@pytest.mark.parametrize("key", [None, "alice"])
async def test_half_sent_bodies_reserve_only_the_received_bytes(key: str | None) -> None:
    bodies = Bodies(LIMIT)
    half = [Sender(bodies, length, "mallory") for length in (SMALL, LIMIT) for _ in range(200)]
    for sender in half:
        sender.send(1)
    half[-1].send(SMALL)
    await half[-1].settle()
    assert bodies.small.nbytes + bodies.large.nbytes == SMALL + 400
    for size in (100, SMALL, LIMIT):
        sender = Sender(bodies, size, key)
        sender.send(size, more=False)
        assert await sender.whole() == size
    for sender in half:
        sender.body.cancel()


async def test_a_key_waits_only_for_bodies_of_that_key() -> None:
    bodies = Bodies(LIMIT)
    full = [Sender(bodies, LIMIT, "mallory") for _ in range(8)]
    for sender in full:
        sender.send(LIMIT - 1)
        await sender.settle()
    assert held(bodies) == LIMIT - 1  # the first
    waiting = Sender(bodies, 2 * SMALL, "mallory")
    waiting.send(2 * SMALL, more=False)
    others = [Sender(bodies, 6 * SMALL, name) for name in ("alice", "bob") for _ in range(3)]
    for sender in others:
        sender.send(6 * SMALL, more=False)
    assert await asyncio.gather(*(sender.whole() for sender in others)) == [6 * SMALL] * 6
    assert not waiting.body.done()
    for sender in full:
        sender.body.cancel()
    assert await waiting.whole() == 2 * SMALL


def test_each_owner_gets_its_share_of_the_byte_limit_in_order() -> None:
    gate = ByteGate(12)
    first, second, third = (gate.ask(6, "a") for _ in range(3))
    assert [ticket.granted.done() for ticket in (first, second, third)] == [True, True, False]
    other = gate.ask(20, "b")
    assert other.granted.done(), "the only one of its owner"
    second.shrink(5)
    assert gate.count_waiting("a") == 1, "one that shrinks needs no more"
    second.close()
    assert not third.granted.done(), "the part of `a` is 6 now"
    behind = gate.ask(1, "b")
    other.close()
    assert behind.granted.done()
    first.close()
    assert third.granted.done()
    third.close()
    behind.close()
    assert gate.nbytes == 0
