"""A reader that takes its time costs its worker, and the engine, a bounded amount of memory."""

import asyncio
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlx_provider.client.messages import LineBuffer
from mlx_provider.protocol.event_queue import (
    GET_BYTES,
    MAX_JOINED_BYTES,
    UNREAD_LIMIT,
    EventQueue,
    event_bytes,
)
from mlx_provider.protocol.events import EVENT_BATCH, Delta, Done, Failed, Finish, TokenLogprob
from mlx_provider.protocol.events import ToolCallDelta as Call

UNREAD = "flood 20000"
"""20 MB."""
STAYS = 10_000_000
"""Bytes of it, at least: the rest may lie in buffers on the way, as large as kernels have them."""


def left_at_the_engine(client: Any, request_of: Any, read: Any, name: str) -> int:
    """Bytes, once the engine has finished the reply and served another request."""
    while name not in client.cache_report()["finished"]:
        time.sleep(0.01)
    read(client.submit(request_of("count 1 0.001")))
    return int(client.cache_report()["unread"][name])


def test_unread_events_stay_in_the_engine(
    client: Any, request_of: Any, read: Any, text: Any
) -> None:
    generation = client.submit(request_of(UNREAD, id="unread"))
    assert left_at_the_engine(client, request_of, read, "unread") > STAYS
    events = read(generation)
    assert text(events) == "x" * 20_000_000
    assert isinstance(events[-1], Done)


async def test_events_unread_by_an_event_loop_stay_in_the_engine(
    client: Any, request_of: Any, read: Any, text: Any
) -> None:
    generation = await asyncio.to_thread(client.submit, request_of(UNREAD, id="left"))
    events = await generation.aget(300)
    assert await asyncio.to_thread(left_at_the_engine, client, request_of, read, "left") > STAYS
    while batch := await generation.aget(300):
        events += batch
    assert text(events) == "x" * 20_000_000


def test_an_unread_reply_ends_when_its_generation_or_client_closes(
    client: Any, request_of: Any, read: Any, wait_until: Any
) -> None:
    closed, dropped, left = (
        client.submit(request_of(UNREAD + " wait", id=name)) for name in ("c", "d", "l")
    )
    closed.close()
    del dropped
    gc.collect()
    wait_until(lambda: {"c", "d"} <= {*client.cache_report()["cancelled"]})
    assert "l" not in client.cache_report()["cancelled"]
    client.close()
    assert isinstance(read(closed)[-1], Failed)
    assert isinstance(read(left)[-1], Failed)
    wait_until(lambda: "l" in client.cache_report()["cancelled"])


def test_an_unread_reply_fails_with_engine_died_when_the_engine_ends(
    local: Any, request_of: Any, read: Any
) -> None:
    client = local.client()
    generation = client.submit(request_of("flood 20000"))
    local.end()
    last = read(generation)[-1]
    assert isinstance(last, Failed)
    assert last.error.code == "engine_died"


def test_pausing_readers_in_threads_and_loops_do_not_deadlock(
    client: Any, request_of: Any, text: Any
) -> None:
    def read_slowly(seed: int) -> int:
        generation = client.submit(request_of("flood 3000"))
        length = 0
        while batch := generation.get(300):
            length += len(text(batch))
            time.sleep(0.001 * (seed % 4))
            if seed % 5 == 0 and length:
                generation.close()
                return 3_000_000
        return length

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(read_slowly, range(16))) == {3_000_000}


def entry(top: int = 20) -> TokenLogprob:
    named = [TokenLogprob(token="x", id=i, logprob=-1.0, bytes=[120]) for i in range(top)]
    return TokenLogprob(token="x", id=0, logprob=-1.0, bytes=[120], top=named)


def test_too_many_unread_logprobs_end_the_request() -> None:
    queue, largest = EventQueue(), 0
    one = entry()
    while not queue.ended:
        queue.put([Delta(content="x", logprobs=[one])])
        largest = max(largest, queue.unread)
    assert UNREAD_LIMIT < largest < 2.1 * UNREAD_LIMIT
    [last] = queue.get()
    assert isinstance(last, Failed)
    assert "unread" in last.error.message
    assert queue.unread == 0
    assert queue.get() == []


def test_logprobs_arrive_complete_in_bounded_batches() -> None:
    queue = EventQueue()
    one = entry()
    found = []
    for index in range(200):
        queue.put([Delta(content=f"{index} ", logprobs=[one])])
    queue.put([Finish(reason="stop")])
    while len(found) < 201:
        batch = queue.get(0)
        assert sum(map(event_bytes, batch)) < GET_BYTES + 2 * MAX_JOINED_BYTES
        found += [d for event in batch for d in getattr(event, "logprobs", [event])]
    assert found[:200] == [one] * 200


def test_unread_deltas_of_each_choice_are_joined() -> None:
    queue = EventQueue()
    for index in range(40_000):
        queue.put([Delta(index=index % 4, content="x")])
    assert queue.unread < 2**20
    queue.put([Finish(index=1, reason="stop"), Delta(index=0, content="y")])
    events = queue.get()
    assert len(events) < 10
    for index, whole in ((0, "x" * 10_000 + "y"), (1, "x" * 10_000)):
        deltas = [e for e in events if isinstance(e, Delta) and e.index == index]
        assert "".join(delta.content for delta in deltas) == whole


def test_unread_pieces_of_a_tool_call_are_joined() -> None:
    queue = EventQueue()
    queue.put([Delta(tool_calls=[Call(index=0, id="a", name="f")])])
    for _ in range(5000):
        queue.put([Delta(tool_calls=[Call(index=0, arguments="1")])])
    queue.put([Delta(tool_calls=[Call(index=1, id="b", name="g", arguments="2")])])
    assert queue.unread < 2**18
    [event] = queue.get()
    assert isinstance(event, Delta)
    assert event.tool_calls == [
        Call(index=0, id="a", name="f", arguments="1" * 5000),
        Call(index=1, id="b", name="g", arguments="2"),
    ]


def test_a_long_line_is_buffered_in_linear_time() -> None:
    line = EVENT_BATCH.dump_json([Delta(content="x" * 2**24)]) + b"\n"
    lines = LineBuffer()
    began = time.thread_time()
    found = [each for at in range(0, len(line), 1024) for each in lines.feed(line[at : at + 1024])]
    assert time.thread_time() - began < 20
    assert found == [line.strip()]
