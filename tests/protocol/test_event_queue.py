"""Events reach a reader in an event loop from the loop and from threads."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_provider.errors import EngineDied
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.protocol.events import Delta, ErrorBody, Event, Failed

FAILED = Failed(error=ErrorBody.of(EngineDied("end")))


async def read(queue: EventQueue) -> list[Event]:
    found: list[Event] = []
    async with asyncio.timeout(300):
        while events := await queue.aget():
            found += events
    return found


async def test_events_put_in_the_loop_reach_the_reader() -> None:
    queue = EventQueue()
    reader = asyncio.create_task(read(queue))
    for index in range(5):
        queue.put([Delta(index=index)])
        await asyncio.sleep(0)
    queue.put([FAILED])
    queue.put([Delta(content="too late")])
    assert await reader == [*(Delta(index=index) for index in range(5)), FAILED]


async def test_events_put_in_a_thread_reach_the_reader() -> None:
    queue = EventQueue()

    def write() -> None:
        for index in range(200):
            queue.put([Delta(index=index)])
        queue.put([FAILED])

    thread = threading.Thread(target=write)
    reader = asyncio.create_task(read(queue))
    await asyncio.sleep(0)
    thread.start()
    assert await reader == [*(Delta(index=index) for index in range(200)), FAILED]
    thread.join()


async def test_events_put_before_the_reader_starts_are_joined_and_delivered() -> None:
    queue = EventQueue()
    queue.put([Delta(content="a")])
    queue.put([Delta(content="b")])
    queue.put([FAILED])
    assert await read(queue) == [Delta(content="ab"), FAILED]
    assert await queue.aget() == []


async def test_putting_no_event_does_not_end_the_reader() -> None:
    queue = EventQueue()
    reader = asyncio.create_task(read(queue))
    await asyncio.sleep(0)
    queue.put([])
    await asyncio.sleep(0.01)
    queue.put([Delta(content="a"), FAILED])
    assert await reader == [Delta(content="a"), FAILED]


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_put_succeeds_although_the_loop_of_the_reader_has_closed(in_thread: bool) -> None:
    queue, loop = EventQueue(), asyncio.new_event_loop()
    reading = loop.create_task(queue.aget())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "is_closed", lambda: False)  # as it was a moment ago
        if in_thread:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(queue.put, [FAILED]).result(300)
        else:
            queue.put([FAILED])
    assert queue.get(0) == [FAILED]
    reading.get_coro().close()
    reading._log_destroy_pending = False
