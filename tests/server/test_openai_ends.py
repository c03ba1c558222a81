"""How requests on the routes of other APIs end: refused, failed, left, silent for long."""

import asyncio
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import anyio
import pytest

import mlx_provider.server.generate
from mlx_provider.errors import EngineUnavailable
from mlx_provider.protocol.events import Accepted, Delta, Failed, Finish
from mlx_provider.server.app import EngineApp
from mlx_provider.settings import EngineSettings
from mlx_provider.wire.anthropic.routes import PING
from mlx_provider.wire.anthropic.routes import Stream as MessageStream
from mlx_provider.wire.api import COMMENT
from mlx_provider.wire.openai.answer import Stream

PATH = "/v1/completions"
MESSAGES = "/v1/messages"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
PATHS = (PATH, MESSAGES)


def body_of(path: str, prompt: Any, **more: Any) -> dict[str, Any]:
    messages = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 9}
    said: dict[str, Any] = {
        PATH: {"prompt": prompt},
        CHAT: messages,
        MESSAGES: messages,
        RESPONSES: {"input": prompt},
    }[path]
    return {"model": "fake", **said, **more}


def ask(engine: Any, prompt: Any, path: str = PATH, **more: Any) -> Any:
    return engine.http.post(path, json=body_of(path, prompt, **more))


def last_data(text: str) -> Any:
    return json.loads(text.rpartition("data: ")[2])


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_keeps_its_status_and_retry_after(engine: Any, stream: bool) -> None:
    for path in PATHS:
        answer = ask(engine, "fail overloaded 4.2", path, stream=stream)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
        error = answer.json()["error"]
        assert (error["type"], error["message"]) == ("rate_limit_error", "scripted")
        if path == PATH:
            assert (error["code"], error["param"]) == ("overloaded", "prompt")
    answer = ask(engine, ["count 1 0", "fail context_length_exceeded"], stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].endswith("exceeded: prompt[1]: scripted")


@pytest.mark.parametrize(("path", "kind"), [(PATH, "server_error"), (MESSAGES, "api_error")])
def test_unexpected_errors_have_the_form_of_the_api(engine: Any, path: str, kind: str) -> None:
    answer = ask(engine, "bug", path)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, kind)
    assert "scripted bug" not in answer.text


@pytest.fixture(scope="module")
def left(spawn: Any) -> Iterator[Any]:
    """An engine whose gate opens in the end."""
    engine = spawn()
    yield engine
    engine.http.delete("/cache")


@pytest.mark.parametrize(
    ("path", "prompts"),
    [
        *((path, [word]) for path in (CHAT, RESPONSES, MESSAGES) for word in ("wait", "gate")),
        (PATH, ["wait", "gate"]),
    ],
)
def test_a_client_that_leaves_a_stream_cancels_every_prompt(
    left: Any, wait_until: Any, path: str, prompts: list[str]
) -> None:
    """Also one that is not accepted yet (`gate`), and those before it, which are."""
    before = len(left.seen()["submitted"])
    body = body_of(path, prompts if path == PATH else prompts[0], stream=True)
    with left.connected("POST", path, **body) as client:
        wait_until(lambda: len(left.seen()["submitted"]) == before + len(prompts))
        if "gate" not in prompts:
            assert client.recv(12) == b"HTTP/1.1 200"
    for name in left.seen()["submitted"][before:]:
        left.await_seen("cancelled", name)
    names = left.seen()["cancelled"]
    assert len(names) == len(set(names))


def test_the_end_of_the_engine_ends_streams_with_an_error(spawn: Any) -> None:
    engine = spawn()
    with ExitStack() as open_streams:
        responses = [
            open_streams.enter_context(
                engine.http.stream("POST", path, json=body_of(path, "wait", stream=True))
            )
            for path in PATHS
        ]
        engine.process.send_signal(signal.SIGTERM)
        text, message = (last_data(each.read().decode()) for each in responses)
    assert text["error"]["code"] == "engine_unavailable"
    assert (message["type"], message["error"]["type"]) == ("error", "api_error")


class Exchange:
    """A request to an app, and what it was sent. `leaves`: the client does so after the first
    bytes."""

    def __init__(self, path: str, prompt: str, *, leaves: bool = False, **more: Any) -> None:
        self.path, self.body = path, json.dumps(body_of(path, prompt, **more)).encode()
        self.statuses, self.said = list[int](), b""
        self.left = anyio.Event()
        self.leaves = leaves

    async def run(self, service: Any) -> "Exchange":
        scope = {"type": "http", "method": "POST", "path": self.path, "headers": []}
        more = {"raw_path": self.path.encode(), "query_string": b""}
        await EngineApp(service).asgi(scope | more, self._receive, self.send)
        return self

    async def _receive(self) -> dict[str, Any]:
        if self.body:
            self.body, given = b"", self.body
            return {"type": "http.request", "body": given}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])
        self.said += message.get("body", b"")
        if self.said and self.leaves:
            self.left.set()


@pytest.mark.parametrize(
    ("path", "beat", "end"),
    [(PATH, COMMENT, "data: [DONE]"), (MESSAGES, PING, 'data: {"type":"message_stop"}')],
)
async def test_a_silent_stream_has_heartbeats(
    fake_service: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    beat: bytes,
    end: str,
) -> None:
    monkeypatch.setattr(mlx_provider.server.generate, "HEARTBEAT", 0.01)
    sent = await Exchange(path, "count 2 0.2", stream=True).run(fake_service(EngineSettings()))
    assert beat in sent.said
    frames = sent.said.replace(beat, b"").decode().split("\n\n")
    assert all(frame.startswith(("event: ", "data: ")) for frame in frames if frame)
    assert frames[-2].endswith(end)


@pytest.fixture
def slow_load(fake_service: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    class Loads(fake_service):  # type: ignore[misc]
        """A model loads until `reported`: what is done was asked for, twice."""

        says = "fake: compiling kernels, once on this machine"
        reported, loads = threading.Semaphore(0), False

        def submit(self, *given: Any) -> Accepted:
            self.loads = True
            assert all(self.reported.acquire(timeout=60) for _ in range(2))
            return super().submit(*given)  # type: ignore[no-any-return]

        def loading(self, model: str) -> str:
            assert model == body_of(PATH, "")["model"]
            if self.loads:
                self.reported.release()
            return self.says if self.loads else ""

    monkeypatch.setattr(mlx_provider.server.generate, "HEARTBEAT", 0.01)
    monkeypatch.setattr(mlx_provider.server.generate, "LONG_LOAD", 0.01)
    return Loads(EngineSettings())


LOADING = b": loading: fake: compiling kernels, once on this machine ("


@pytest.mark.parametrize("prompt", ["count 2 0", "fail context_length_exceeded", "fail overloaded"])
@pytest.mark.parametrize("path", [PATH, CHAT, MESSAGES, RESPONSES])
async def test_a_stream_that_waits_for_a_long_load_reports_the_load(
    slow_load: Any, path: str, prompt: str
) -> None:
    """An error then comes in the stream, in the form of its API."""
    sent = await Exchange(path, prompt, stream=True).run(slow_load)
    assert sent.statuses == [200]
    assert sent.said.startswith(LOADING)
    frames = [each for each in sent.said.decode().split("\n\n") if each[:1] not in ("", ":")]
    assert all(frame.startswith(("event: ", "data: ")) for frame in frames)
    assert any("scripted" in frame for frame in frames) == ("fail" in prompt)
    assert ("error" in frames[-1] or "failed" in frames[-2]) == ("fail" in prompt)


@pytest.mark.parametrize(
    ("prompt", "last"), [("count 2 0", b"\n\ndata: [DONE]"), ("fail overloaded", b"overloaded")]
)
async def test_a_stream_begins_once_if_the_load_ends_meanwhile(
    slow_load: Any, prompt: str, last: bytes
) -> None:
    """Or fails, while a slow reader takes the head of the reply."""
    exchange = Exchange(PATH, prompt, stream=True)
    own = exchange.send

    async def send(message: dict[str, Any]) -> None:
        await own(message)
        if message["type"] == "http.response.start":
            slow_load.reported.release(2)
            await anyio.sleep(0.2)

    exchange.send = send
    await exchange.run(slow_load)
    assert exchange.statuses == [200]
    assert last in exchange.said[-200:]


async def test_a_request_that_waits_for_something_else_keeps_the_status_of_an_error(
    slow_load: Any,
) -> None:
    slow_load.says = ""
    sent = await Exchange(PATH, "fail overloaded", stream=True).run(slow_load)
    assert sent.statuses == [429]
    assert json.loads(sent.said)["error"]["code"] == "overloaded"


async def test_a_whole_reply_keeps_the_status_of_an_error(slow_load: Any) -> None:
    threading.Timer(0.1, slow_load.reported.release, [2]).start()
    sent = await Exchange(PATH, "fail overloaded").run(slow_load)
    assert sent.statuses == [429]


async def test_a_client_that_leaves_during_a_long_load_cancels_its_request(slow_load: Any) -> None:
    sent = await Exchange(PATH, "wait", stream=True, leaves=True).run(slow_load)
    slow_load.reported.release(2)
    assert sent.said.startswith(LOADING)
    assert len(slow_load.seen["cancelled"]) == 1


async def test_a_slow_reader_gets_no_heartbeat_after_the_end(
    fake_service: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffer is full for longer than the silence after which heartbeats are sent."""
    monkeypatch.setattr(mlx_provider.server.generate, "HEARTBEAT", 0.01)
    sent = list[bool]()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] != "http.response.body":
            return
        await asyncio.sleep(0.1)
        assert False not in sent, "something follows the end"
        assert message["body"] != COMMENT or not sent
        sent.append(message["more_body"])

    exchange = Exchange(PATH, "count 2 0", stream=True)
    exchange.send = send
    await exchange.run(fake_service(EngineSettings()))
    assert sent[-1] is False


def test_nothing_follows_an_error_in_a_stream() -> None:
    accepted = Accepted(id="r", model="m", prompt_tokens=1, max_tokens=1)
    for failed in (Failed.of(EngineUnavailable("gone")), Finish(reason="cancelled")):
        stream = Stream(accepted)
        out = stream.feed([Delta(content="a"), failed]) + stream.feed([Delta(content="b")])
        frames = [
            json.loads(frame.removeprefix("data: ")) for frame in out.decode().split("\n\n")[:-1]
        ]
        assert frames[0]["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
        assert frames[1]["error"]["code"] == "engine_unavailable"
        assert len(frames) == 2
        message = MessageStream(accepted, wanted=1)
        out = message.feed([accepted, Delta(content="a"), failed]) + message.feed(
            [Delta(content="b")]
        )
        kinds = re.findall("event: (.*)", out.decode())
        block = ["content_block_start", "content_block_delta"]
        assert kinds == ["message_start", *block, "error"]
