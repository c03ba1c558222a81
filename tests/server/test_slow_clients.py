"""Clients that bring nothing, bring it byte by byte, or take nothing: none holds the engine."""

import asyncio
import json
import os
import resource
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.server.access import Key
from mlx_provider.server.app import EngineApp
from mlx_provider.server.connections import ConnectionLimits, listen_tcp, listen_unix
from mlx_provider.server.process import CLOSE_LIMIT, WRITE_LIMIT, EngineServer, LoopDelivery
from mlx_provider.settings import EngineSettings
from waiting import PATIENCE

HEAD = b"POST /v1/generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
ATTACH = b"GET /v1/attach HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
SHORT = ConnectionLimits(arrival=0.15, unread=0.3, tick=0.03)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """A server in this loop, and raw connections to it."""

    def __init__(self, server: EngineServer, service: Any, stack: AsyncExitStack) -> None:
        self.server = server
        self.service = service
        self._stack = stack

    async def connect(self, data: bytes = b"") -> Streams:
        address = self.server.listener.address
        if address.startswith("unix:"):
            reader, writer = await asyncio.open_unix_connection(address[5:])
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", address.split(":")[-1])
        self._stack.callback(writer.close)
        writer.write(data)
        return reader, writer

    async def open(self, request: bytes) -> Streams:
        """A connection whose reply has begun."""
        reader, writer = await self.connect(request)
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        return reader, writer


@asynccontextmanager
async def serving(
    fake_service: Callable[..., Any],
    limits: ConnectionLimits = SHORT,
    tcp: bool = False,
    keys: Sequence[Key] = (),
) -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory(prefix="mlxp") as folder:
        stack = AsyncExitStack()
        delivery = LoopDelivery(asyncio.get_running_loop())
        service = fake_service(EngineSettings(), delivery)
        listener = listen_tcp("127.0.0.1", 0) if tcp else listen_unix(Path(folder) / "s")
        ready = asyncio.Event()
        server = EngineServer(EngineApp(service, keys=keys), service, listener, ready.set, limits)
        running = asyncio.create_task(server.run_until_stopped(None))
        await ready.wait()
        async with stack:
            yield Served(server, service, stack)
        server.stop()
        await asyncio.wait_for(running, PATIENCE)


def generate(prompt: str, **fields: Any) -> bytes:
    body = json.dumps({"model": "fake", "prompt": prompt, **fields}).encode()
    return HEAD % len(body) + body


async def ended(streams: Streams) -> bool:
    """Whether the server ends the connection, whatever it writes before."""
    try:
        async with asyncio.timeout(PATIENCE):
            while await streams[0].read(65536):
                pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


async def drip(streams: Streams, data: bytes) -> None:
    for at in range(len(data)):
        streams[1].write(data[at : at + 1])
        await asyncio.sleep(0.03)


async def test_memory_pressure_reaches_the_service(
    fake_service: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_provider.server.process.pressure_level", lambda: 2)
    async with serving(fake_service) as served, asyncio.timeout(PATIENCE):
        while "kept" not in served.service.seen:
            await asyncio.sleep(0.01)
    assert served.service.seen["kept"] == 0.5


@pytest.mark.parametrize(
    ("begun", "tcp"),
    [
        (b"", False),
        (b"", True),
        (b"P", False),
        (HEAD[:30], False),
        (HEAD % 100_000, True),
        (HEAD % 9 + b"{", False),
    ],
    ids=["nothing", "nothing by tcp", "byte", "head", "no body by tcp", "body"],
)
async def test_a_connection_without_a_complete_request_is_closed(
    fake_service: Any, begun: bytes, tcp: bool
) -> None:
    async with serving(fake_service, tcp=tcp) as served:
        assert await ended(await served.connect(begun))
        assert not served.server.server_state.connections
        assert b'"ok":true' in await _answer(await served.connect(HEALTH))


async def test_an_incomplete_second_request_is_closed(fake_service: Any) -> None:
    async with serving(fake_service) as served:
        streams = await served.connect(HEALTH)
        await _answer(streams)
        streams[1].write(b"GET /he")
        assert await ended(streams)


@pytest.mark.parametrize("begun", [b"", HEAD % 100_000], ids=["head", "body"])
async def test_a_request_sent_byte_by_byte_is_closed(fake_service: Any, begun: bytes) -> None:
    async with serving(fake_service) as served:
        streams = await served.connect(begun)
        slow = asyncio.create_task(drip(streams, b"POST /" + b"x" * 10_000))
        assert await ended(streams)
        slow.cancel()


async def test_a_slow_but_steady_body_is_accepted(fake_service: Any) -> None:
    limits = ConnectionLimits(arrival=0.2, rate=1, tick=0.05)
    async with serving(fake_service, limits) as served:
        whole = generate("count 1 0", stop=["y" * 1000] * 4)
        reader, writer = await served.connect()
        for at in range(0, len(whole), 200):
            writer.write(whole[at : at + 200])
            await asyncio.sleep(0.05)
        assert b" 200 " in await asyncio.wait_for(reader.readline(), PATIENCE)


async def test_silent_attached_clients_and_open_replies_stay_connected(fake_service: Any) -> None:
    async with serving(fake_service) as served:
        kept = [await served.open(ATTACH), await served.open(generate("wait"))]
        assert await ended(await served.connect())
        assert await ended(await served.connect())
        assert all(not reader.at_eof() for reader, _ in kept)
        assert served.server.app.activity.requests


async def test_idle_connections_are_closed_for_new_ones_at_the_limit(fake_service: Any) -> None:
    limits = ConnectionLimits(connections=8)
    async with serving(fake_service, limits) as served:
        kept = [await served.open(ATTACH), await served.open(generate("wait"))]
        idle = await served.connect(HEALTH)
        await _answer(idle)
        first = await served.connect()
        for _ in range(40):
            await served.connect()
        assert await ended(first)
        assert b'"ok":true' in await _answer(await served.connect(HEALTH))
        assert len(served.server.server_state.connections) <= 8
        assert not idle[0].at_eof()
        assert all(not reader.at_eof() for reader, _ in kept)


async def test_a_connection_with_an_unread_reply_is_not_closed(fake_service: Any) -> None:
    async with serving(fake_service, ConnectionLimits(connections=1)) as served:
        streams = await served.connect(HEALTH)
        await _answer(streams)
        streams[1].transport.pause_reading()  # type: ignore[attr-defined]
        [protocol] = served.server.server_state.connections
        protocol.transport.write(b"x" * 2**20)
        assert b" 429 " in await (await served.connect(HEALTH))[0].readline()
        assert protocol in served.server.server_state.connections


async def test_a_connection_with_a_slow_body_is_closed_for_a_new_one(fake_service: Any) -> None:
    limits = ConnectionLimits(connections=4, slow_body=0.1, tick=0.05)
    async with serving(fake_service, limits) as served:
        slow = [await served.connect(HEAD % 9) for _ in range(4)]
        while min(p.seconds for p in served.server.server_state.connections) < 0.1:
            await asyncio.sleep(0.05)
        assert b'"ok":true' in await _answer(await served.connect(HEALTH))
        assert await ended(slow[0])


async def test_with_every_connection_in_use_the_next_one_gets_429(fake_service: Any) -> None:
    async with serving(fake_service, ConnectionLimits(connections=3)) as served:
        kept = [await served.open(ATTACH) for _ in range(3)]
        for _ in range(100):
            await served.connect(HEALTH)
        refused = await asyncio.wait_for((await served.connect(HEALTH))[0].read(), PATIENCE)
        head, _, body = refused.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429 ")
        assert json.loads(body)["error"]["code"] == "overloaded"
        assert all(not reader.at_eof() for reader, _ in kept)


KEYS = (Key("operator" * 3), Key("alice" * 5, "alice"), Key("mallory" * 5, "mallory"))


def with_key(request: bytes, name: str | None) -> bytes:
    [key] = (key.text for key in KEYS if key.name == name)
    more = f"\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n\r\n"
    return request.replace(b"\r\n\r\n", more.encode(), 1)


@pytest.mark.parametrize(
    "request_of_mallory",
    [ATTACH, generate("wait"), HEAD % 100, generate("flood 20000")],
    ids=["attached", "running", "half a body", "not read"],
)
async def test_no_named_key_takes_all_connections(
    fake_service: Any, request_of_mallory: bytes
) -> None:
    limits = ConnectionLimits(connections=8, slow_body=PATIENCE)
    async with serving(fake_service, limits, tcp=True, keys=KEYS) as served:

        async def status(request: bytes, name: str | None) -> bytes:
            reader, _ = await served.connect(with_key(request, name))
            return (await asyncio.wait_for(reader.readline(), PATIENCE))[9:12]

        state = served.server.server_state
        for _ in range(8):
            _, writer = await served.connect(with_key(request_of_mallory, "mallory"))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        while state.admits("mallory"):
            await asyncio.sleep(0.01)
        assert await status(ATTACH, "mallory") == b"429"
        assert [await status(ATTACH, "alice") for _ in range(3)] == [b"200", b"200", b"429"]
        assert [await status(ATTACH, None) for _ in range(2)] == [b"200"] * 2


async def test_a_reader_that_reads_nothing_is_disconnected(fake_service: Any) -> None:
    async with serving(fake_service) as served:
        _, writer = await served.connect(generate("flood 20000", id="unread"))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(PATIENCE):
            while "unread" not in served.service.seen["finished"]:
                await asyncio.sleep(0.05)
            while served.server.app.activity.requests:
                await asyncio.sleep(0.05)


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="a limit of another process")
def test_a_flood_of_connections_does_not_exhaust_the_open_files(spawn: Any) -> None:
    engine = spawn()
    resource.prlimit(engine.process.pid, resource.RLIMIT_NOFILE, (160, 160))
    with ExitStack() as stack, engine.http.stream("GET", "/v1/attach") as attached:
        pieces = attached.iter_raw()
        next(pieces)
        for _ in range(300):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(engine.folder / "engine.sock"))
        assert engine.lines("count 3 0")
        open_files = len(list(Path(f"/proc/{engine.process.pid}/fd").iterdir()))
        assert open_files < 160
    assert engine.end() == 0
    assert "out of system resource" not in engine.process.stderr.read()


def test_an_engine_with_hundreds_of_clients_ends_in_time(spawn: Any) -> None:
    engine = spawn()
    with ExitStack() as stack:
        for n in range(300):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(engine.folder / "engine.sock"))
            unread = generate("flood 2000", id=f"r{n}") if n < 30 else generate("wait", id=f"r{n}")
            client.sendall((b"", ATTACH, HEAD % 9, HEALTH, unread)[n % 5])
        engine.await_seen("submitted", "r299")
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(CLOSE_LIMIT + WRITE_LIMIT + PATIENCE) == 0
        assert "Traceback" not in engine.process.stderr.read()


async def test_a_signal_that_meets_a_busy_loop_is_not_lost(fake_service: Any) -> None:
    async with serving(fake_service) as served:
        for _ in range(2000):  # fills the pipe that wakes the loop
            asyncio.get_running_loop().call_soon_threadsafe(lambda: None)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            while not served.server.should_exit:
                await asyncio.sleep(0.01)


async def _answer(streams: Streams) -> bytes:
    """The first answer on a connection that stays open."""
    async with asyncio.timeout(PATIENCE):
        head = await streams[0].readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return await streams[0].readexactly(length)
