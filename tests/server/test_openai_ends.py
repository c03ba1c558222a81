"""How requests on the routes of other APIs end: refused, failed, left, silent for long."""

import asyncio
import json
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import anyio
import pytest

import mlx_provider.server.generate
from mlx_provider.config import EngineSettings
from mlx_provider.errors import EngineUnavailable
from mlx_provider.protocol.events import Accepted, Delta, Failed, Finish
from mlx_provider.server.app import EngineApp
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


async def ask_app(app: EngineApp, path: str, prompt: str, send: Callable[..., Any]) -> None:
    """A stream of an engine in this process, whose client stays."""
    unread = [json.dumps(body_of(path, prompt, stream=True)).encode()]

    async def receive() -> dict[str, Any]:
        if unread:
            return {"type": "http.request", "body": unread.pop()}
        await anyio.sleep_forever()
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    await app.asgi({**scope, "query_string": b"", "headers": []}, receive, send)


def last_data(text: str) -> Any:
    return json.loads(text.rpartition("data: ")[2])


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_keeps_its_status_and_its_time(engine: Any, stream: bool) -> None:
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
def test_an_unforeseen_error_has_the_form_of_its_api(engine: Any, path: str, kind: str) -> None:
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
    said = b""

    async def send(message: dict[str, Any]) -> None:
        nonlocal said
        said += message.get("body", b"")

    await ask_app(EngineApp(fake_service(EngineSettings())), path, "count 2 0.2", send)
    assert beat in said
    frames = said.replace(beat, b"").decode().split("\n\n")
    assert all(frame.startswith(("event: ", "data: ")) for frame in frames if frame)
    assert frames[-2].endswith(end)


async def test_a_slow_reader_gets_no_heartbeat_behind_the_end(
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

    await ask_app(EngineApp(fake_service(EngineSettings())), PATH, "count 2 0", send)
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
