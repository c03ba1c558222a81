"""The thread that owns a client's connections."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import anyio
import pytest

from mlx_provider.client.io_thread import IOThread


async def cancelled_as_data_comes(path: Path) -> None:
    """A wait for data, cancelled in the turn of the loop in which the data are there."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        async with await anyio.connect_unix(path) as stream, anyio.create_task_group() as tasks:
            peer, _ = server.accept()
            with peer:
                tasks.start_soon(stream.receive)
                await asyncio.sleep(0.05)
                peer.send(b"x")
                await asyncio.sleep(0)  # this task runs next, and before what the data wake
                tasks.cancel_scope.cancel()


async def fails_later() -> None:
    asyncio.get_running_loop().call_soon(lambda: 1 // 0)
    await asyncio.sleep(0.05)


def test_a_cancel_that_meets_data_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    thread = IOThread("of the test")
    with caplog.at_level(logging.ERROR):
        thread.call(cancelled_as_data_comes(tmp_path / "s"))
        assert not caplog.records
        thread.call(fails_later())
    thread.stop()
    assert "ZeroDivisionError" in caplog.text
