"""A hand-written engine behind the client interface, and the provider that talks to it."""

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable

import litellm
import pytest

import mlx_provider.litellm as ours
from mlx_provider.client.generation import Generation
from mlx_provider.errors import MLXProviderError
from mlx_provider.litellm.provider import Provider
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.protocol.events import Accepted, Delta, Done, Event, Finish, Timings, Usage
from mlx_provider.protocol.requests import GenerateRequest
from waiting import PATIENCE


def pytest_itemcollected(item: pytest.Item) -> None:
    """LiteLLM's own deprecations are not ours to fix; leaks and lost coroutines stay errors."""
    item.add_marker(pytest.mark.filterwarnings("ignore::UserWarning"))
    item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where LiteLLM's proxy is not installed. Else its bridges import it, which takes seconds,
    and later tests would find it."""
    monkeypatch.setitem(sys.modules, "litellm.proxy.proxy_server", None)


TIMINGS = Timings(queued=0.0, prefill=0.1, first_token=0.1, total=0.2, tokens_per_second=42.0)


def done(prompt: int = 9, completion: int = 4, cached: int = 0, reasoning: int = 0) -> Done:
    usage = Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        reasoning_tokens=reasoning,
    )
    return Done(usage=usage, timings=TIMINGS)


def plain(request: GenerateRequest) -> list[list[Event]]:
    """`Hello world!` in three steps."""
    texts = ["Hello", " world", "!"]
    steps: list[list[Event]] = [[Delta(content=text)] for text in texts]
    return [*steps, [Finish(reason="stop"), done(completion=3, cached=9)]]


class FakeEngine:
    """An engine whose replies are written by the test; counts what it holds."""

    def __init__(self) -> None:
        self.script: Callable[[GenerateRequest], list[list[Event]]] = plain
        self.pause = 0.0
        self.refuse: Callable[[GenerateRequest], MLXProviderError | None] = lambda request: None
        self.warnings: list[str] = []
        self.context_length: int | None = None
        self.vision: bool | None = None
        self.reasoning: bool | None = None
        self.requests: list[GenerateRequest] = []
        self.addresses: list[tuple[str | None, str | None]] = []
        self.active: set[str] = set()
        self.cancelled: list[str] = []

    def connect(self, api_base: str | None, api_key: str | None) -> "FakeEngine":
        self.addresses.append((api_base, api_key))
        return self

    def submit(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        error = self.refuse(request)
        if error is not None:
            raise error
        queue = EventQueue()
        self.active.add(request.id)
        steps = self.script(request)
        threading.Thread(target=self._speak, args=(request.id, queue, steps), daemon=True).start()
        accepted = Accepted(
            id=request.id,
            model=request.model,
            prompt_tokens=9,
            max_tokens=100,
            context_length=self.context_length,
            vision=self.vision,
            reasoning=self.reasoning,
            echo=str(request.prompt) if getattr(request, "echo", False) else "",
            warnings=self.warnings,
        )
        active, cancelled, name = self.active, self.cancelled, request.id

        def cancel() -> None:
            if name in active:
                active.discard(name)
                cancelled.append(name)

        return Generation(accepted, queue, cancel)

    def _speak(self, name: str, queue: EventQueue, steps: list[list[Event]]) -> None:
        for events in steps:
            if self.pause:
                time.sleep(self.pause)
            if name not in self.active:
                return
            if isinstance(events[-1], Done):
                self.active.discard(name)
            queue.put(events)

    @property
    def request(self) -> GenerateRequest:
        """The last request."""
        return self.requests[-1]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """A fake engine behind the registered provider."""
    fake = FakeEngine()
    provider = Provider(connect=fake.connect)
    entries = [
        {**entry, "custom_handler": provider} if entry["provider"] == "mlx" else entry
        for entry in litellm.custom_provider_map
    ]
    assert ours.handler in [entry["custom_handler"] for entry in litellm.custom_provider_map]
    monkeypatch.setattr(litellm, "custom_provider_map", entries)
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    return fake


async def _until(found: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """`await until(condition)`: other threads may be at work on it."""
    return _until


@pytest.fixture
def scripted() -> dict[str, object]:
    """Words of the protocol for scripts."""
    return {"done": done, "timings": TIMINGS}
