"""Who lets go of a response's stream lets go of the request, whatever it stands at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mlx_provider.litellm.streams import add_heartbeats


class Wrapper:
    """LiteLLM's, which knows what it reads from."""

    def __init__(self) -> None:
        self.closed = False

    async def aclose(self) -> None:
        self.closed = True


async def numbers() -> AsyncIterator[int]:
    for number in range(3):
        yield number


def stream_of(wrapper: Wrapper, seconds: float | None = None) -> Any:
    return add_heartbeats(numbers(), seconds, tuple, lambda number: number, wrapper)


@pytest.mark.parametrize("seconds", [None, 5])
async def test_read_to_the_end(seconds: float | None) -> None:
    wrapper = Wrapper()
    assert [each async for each in stream_of(wrapper, seconds)] == [0, 1, 2]
    assert wrapper.closed


async def test_a_client_that_leaves_while_a_chunk_is_sent() -> None:
    wrapper, sending = Wrapper(), asyncio.Event()

    async def send_all() -> None:
        async for _ in stream_of(wrapper):
            sending.set()
            await asyncio.sleep(60)

    reader = asyncio.create_task(send_all())
    await sending.wait()
    reader.cancel()
    await asyncio.wait({reader})
    for _ in range(100):
        await asyncio.sleep(0)  # the loop closes what nobody holds any more
    assert wrapper.closed
