"""Whatever way a client leaves, the request is freed at once; time limits hold."""

import asyncio
import gc
import threading
import time
from functools import partial

import litellm
import pytest
from litellm.exceptions import BadRequestError, ServiceUnavailableError

from mlx_provider.client.generation import Generation
from mlx_provider.errors import BadRequest, EngineDied
from mlx_provider.litellm.call import Deadline
from mlx_provider.litellm.streams import OpenRequest, ResponseStream
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.protocol.events import Accepted, Delta, ErrorBody, Failed, Finish

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def slow(engine, scripted):
    """An engine that speaks for longer than anybody waits."""
    engine.pause = 0.01
    engine.script = lambda request: [
        *([Delta(content=f"t{i} ")] for i in range(10_000)),
        [Finish(reason="stop"), scripted["done"]()],
    ]
    return engine


async def stream(**more):
    return await litellm.acompletion(model="mlx/m", messages=HI, stream=True, **more)


@pytest.mark.parametrize("chunks", [0, 1])
async def test_closing_a_stream_cancels_its_request(slow, chunks):
    reply = await stream()
    for _ in range(chunks):
        await anext(reply)
    assert len(slow.active) == 1
    await reply.aclose()
    assert not slow.active


def collected(slow):
    """Whether it is freed. Garbage is collected seldom: the logging threads need the time."""
    if slow.active:
        time.sleep(0.2)
        gc.collect()
    return not slow.active


async def test_dropping_an_async_stream_cancels_its_request(slow, until):
    reply = await stream()
    assert len(slow.active) == 1
    del reply  # the loop's handle, or LiteLLM's logging threads, hold it a moment longer
    await until(partial(collected, slow))


def test_dropping_a_sync_stream_cancels_its_request(slow, until):
    reply = litellm.completion(model="mlx/m", messages=HI, stream=True)
    next(reply)
    del reply  # LiteLLM's logging threads may hold the stream a moment longer
    asyncio.run(until(partial(collected, slow)))


async def reply_to(streaming, **more):
    reply = await litellm.acompletion(model="mlx/m", messages=HI, stream=streaming, **more)
    async for _ in reply:
        pass


@pytest.fixture
def awaited(monkeypatch):
    """Set once the event loop waits for what the engine says."""
    event, aget = asyncio.Event(), EventQueue.aget

    async def telling(self, timeout=None):
        event.set()
        return await aget(self, timeout)

    monkeypatch.setattr(EventQueue, "aget", telling)
    return event


@pytest.mark.parametrize("streaming", [False, True])
async def test_cancelling_the_task_cancels_its_request(slow, awaited, streaming):
    task = asyncio.create_task(reply_to(streaming))
    await awaited.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not slow.active


@pytest.mark.parametrize(
    "ask",
    [
        partial(reply_to, False),
        partial(reply_to, True),
        partial(litellm.aembedding, model="mlx/m", input=["hi"]),
    ],
    ids=["whole", "stream", "embedding"],
)
async def test_a_task_cancelled_before_the_engine_accepts_cancels_its_request(slow, until, ask):
    """A thread has the request by then; it is freed once the engine has accepted it."""
    accepting, script = threading.Event(), slow.script
    slow.script = lambda request: [accepting.wait(300), *script(request)][1:]
    task = asyncio.create_task(ask())
    await until(lambda: slow.active)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    accepting.set()
    await until(lambda: not slow.active)
    assert slow.cancelled


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_async_call_beyond_its_time_limit_is_cancelled(slow, until, streaming):
    with pytest.raises(litellm.Timeout, match=r"time limit of 0\.3 s has passed"):
        await reply_to(streaming, timeout=0.3)
    await until(lambda: not slow.active)  # accepted, perhaps, when the time had passed


def test_a_blocking_call_beyond_its_time_limit_is_cancelled_with_a_timeout(slow, until):
    with pytest.raises(litellm.Timeout, match=r"time limit of 0\.3 s has passed"):
        litellm.completion(model="mlx/m", messages=HI, timeout=0.3)
    with pytest.raises(litellm.Timeout, match=r"time limit of 0\.3 s has passed"):
        list(litellm.completion(model="mlx/m", messages=HI, timeout=0.3, stream=True))
    asyncio.run(until(lambda: not slow.active))


async def test_forty_concurrent_requests_end_without_a_cancel(engine):
    replies = await asyncio.gather(
        *(litellm.acompletion(model="mlx/m", messages=HI) for _ in range(40))
    )
    assert {reply.choices[0].message.content for reply in replies} == {"Hello world!"}
    assert not engine.active
    assert not engine.cancelled


async def test_nothing_is_cancelled_after_a_finished_stream(engine):
    reply = await stream()
    assert [chunk async for chunk in reply]
    await reply.aclose()
    assert not engine.cancelled


def failing_reply():
    """A request whose last words and failure come in one batch."""
    queue = EventQueue()
    failed = Failed(error=ErrorBody.of(EngineDied("gone")))
    queue.put([Delta(content="last"), Delta(index=1, content="words"), failed])
    accepted = Accepted(id="r", model="m", prompt_tokens=1, max_tokens=9)
    return OpenRequest(Generation(accepted, queue, lambda: None), Deadline(60), "m")


async def test_chunks_before_a_failure_are_delivered_before_the_error():
    in_thread, in_loop = ResponseStream(failing_reply()), ResponseStream(failing_reply())
    chunks = [next(in_thread), next(in_thread), await anext(in_loop), await anext(in_loop)]
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["last", "words"] * 2
    with pytest.raises(ServiceUnavailableError, match="gone"):
        next(in_thread)
    with pytest.raises(ServiceUnavailableError, match="gone"):
        await anext(in_loop)
    assert next(in_thread, "over") == await anext(in_loop, "over") == "over"


async def test_a_failure_in_the_stream_names_the_parameter_of_the_client(engine):
    late = BadRequest("template: too large", param="template")
    engine.script = lambda request: [[Failed.of(late)]]
    with pytest.raises(BadRequestError, match="chat_template_kwargs: too large"):
        await litellm.acompletion(model="mlx/m", messages=HI, chat_template_kwargs={"a": 1})


async def test_a_cancellation_at_the_time_of_an_event_is_not_lost():
    """`asyncio.wait_for` of Python 3.11 returned the event and forgot the cancellation."""
    queue, freed = EventQueue(), []
    accepted = Accepted(id="r", model="m", prompt_tokens=1, max_tokens=9)
    generation = Generation(accepted, queue, lambda: freed.append(True))
    reply = OpenRequest(generation, Deadline(60), "m")
    task = asyncio.ensure_future(ResponseStream(reply).__anext__())
    await asyncio.sleep(0.01)
    queue.put([Delta(content="x")])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert freed
