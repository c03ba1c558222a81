"""Events reach a reader in the loop from the loop and from threads."""

from __future__ import annotations

import asyncio
import threading

from mlx_provider.errors import EngineDied
from mlx_provider.protocol.messages import Delta, ErrorBody, Event, Failed
from mlx_provider.server.loop_mailbox import LoopMailbox

FAILED = Failed(error=ErrorBody.of(EngineDied("end")))


async def read(mailbox: LoopMailbox) -> list[Event]:
    found: list[Event] = []
    async with asyncio.timeout(20):
        while events := await mailbox.next_events():
            found += events
    return found


async def test_put_in_the_loop() -> None:
    mailbox = LoopMailbox()
    reader = asyncio.create_task(read(mailbox))
    for index in range(5):
        mailbox.put([Delta(index=index)])
        await asyncio.sleep(0)
    mailbox.put([FAILED])
    mailbox.put([Delta(content="too late")])
    assert await reader == [*(Delta(index=index) for index in range(5)), FAILED]


async def test_put_in_a_thread() -> None:
    mailbox = LoopMailbox()

    def write() -> None:
        for index in range(200):
            mailbox.put([Delta(index=index)])
        mailbox.put([FAILED])

    thread = threading.Thread(target=write)
    reader = asyncio.create_task(read(mailbox))
    await asyncio.sleep(0)
    thread.start()
    assert await reader == [*(Delta(index=index) for index in range(200)), FAILED]
    thread.join()


async def test_everything_waits_before_the_reader_comes() -> None:
    mailbox = LoopMailbox()
    mailbox.put([Delta(content="a")])
    mailbox.put([Delta(content="b")])
    mailbox.put([FAILED])
    assert await read(mailbox) == [Delta(content="ab"), FAILED]
    assert await mailbox.next_events() == []
