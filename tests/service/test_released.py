"""The memory of a request is free at its end, without a run of the garbage collector."""

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from in_process import InProcessClient
from mlx_provider.engine.request import PrefillJob, Request, Row
from mlx_provider.errors import BadRequest, ContextTooLong
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.records import MediaItem
from mlx_provider.serving.service import ChatService
from waiting import wait_until

from .conftest import PATIENCE, Tiny
from .test_next_prompt import await_heads
from .test_service_images import question

HELD = (GenerateRequest, Request, Row, PrefillJob, MediaItem)
TOOL = {
    "name": "find",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 3}}},
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in HELD)


def finished(tiny: Tiny) -> None:
    assert tiny.ask(n=2).error is None


def with_calls(tiny: Tiny) -> None:
    tools = [{"type": "function", "function": TOOL}]
    assert tiny.ask(tools=tools, tool_choice="required", max_tokens=60).only.calls


def with_an_image(tiny: Tiny) -> None:
    assert tiny.ask(messages=question("What is it?", 1)).error is None


def cancelled(tiny: Tiny) -> None:
    running = tiny.start(max_tokens=4000, min_tokens=4000)
    running.get(PATIENCE)
    running.close()


def too_long(tiny: Tiny) -> None:
    with pytest.raises(ContextTooLong):
        tiny.start("word " * 100_000)


def refused(tiny: Tiny) -> None:
    with pytest.raises(BadRequest):
        tiny.start(response_format={"type": "json_schema", "schema": {"type": "nothing"}})


def with_branches(tiny: Tiny) -> None:
    for end in ("one", "two", "three"):
        assert tiny.ask("A long beginning. " * 50 + end).error is None


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("family", "ending"),
    [("qwen3", with_branches), ("gemma3", with_branches), ("qwen3_5", with_branches)],
)
def test_an_emptied_cache_has_freed_its_memory(
    make_service: Any, build_tiny: Any, family: str, ending: Any
) -> None:
    service, client = make_service(disk_cache=None)
    model = Tiny(client, service, str(build_tiny(family)))

    def emptied() -> tuple[int, int]:
        """Bytes that were stored, and active bytes afterwards."""
        ending(model)
        await_heads(model)
        stored = service.prefixes.report()["bytes"]
        service.prefixes.clear()
        return stored, mx.get_active_memory()

    emptied()
    gc.collect()
    before = mx.get_active_memory()
    stored, after = emptied()
    assert after - before < stored / 10


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "ending", [finished, with_calls, with_an_image, cancelled, too_long, refused]
)
def test_nothing_of_a_request_waits_for_the_collector(
    shared_service: ChatService, ending: Any
) -> None:
    model = Tiny(InProcessClient(shared_service), shared_service, "demo")
    ending(model)
    await_heads(model)
    gc.collect()
    before = alive()
    for _ in range(3):
        ending(model)
        await_heads(model)
    # the last step knows one
    wait_until(lambda: max((alive() - before).values(), default=0) <= 1)
