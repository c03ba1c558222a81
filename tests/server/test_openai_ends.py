"""How requests on OpenAI's routes end: refused, failed, left, silent for long."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import mlx_provider.server.generate
from mlx_provider.config import EngineSettings
from mlx_provider.errors import EngineUnavailable
from mlx_provider.protocol.events import Accepted, Delta, Failed, Finish
from mlx_provider.server.app import EngineApp
from mlx_provider.wire.openai.form import AnswerForm
from mlx_provider.wire.openai.stream import Stream

PATH = "/v1/completions"


def ask(engine: Any, prompt: Any, **more: Any) -> Any:
    return engine.http.post(PATH, json={"model": "fake", "prompt": prompt, **more})


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_keeps_its_status_and_its_time(engine: Any, stream: bool) -> None:
    answer = ask(engine, "fail overloaded 4.2", stream=stream)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
    wanted = {"type": "rate_limit_error", "code": "overloaded", "param": "prompt"}
    assert answer.json() == {"error": {**wanted, "message": "scripted"}}
    answer = ask(engine, ["count 1 0", "fail context_length_exceeded"], stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].endswith("exceeded: prompt[1]: scripted")


def test_an_unforeseen_error_has_openais_form(engine: Any) -> None:
    answer = ask(engine, "bug")
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "scripted bug" not in answer.text


@pytest.mark.parametrize("prompt", ["wait", ["wait", "wait"]])
def test_a_client_that_leaves_a_stream_cancels_every_prompt(spawn: Any, prompt: Any) -> None:
    engine = spawn()
    body = {"model": "fake", "prompt": prompt, "stream": True}
    count = len(prompt) if isinstance(prompt, list) else 1
    with engine.http.stream("POST", PATH, json=body) as response:
        assert response.status_code == 200
    for name in engine.seen()["submitted"]:
        engine.await_seen("cancelled", name)
    assert len(set(engine.seen()["cancelled"])) == count


def test_the_end_of_the_engine_ends_a_stream_with_an_error(spawn: Any) -> None:
    engine = spawn()
    body = {"model": "fake", "prompt": "wait", "stream": True}
    with engine.http.stream("POST", PATH, json=body) as response:
        engine.process.send_signal(signal.SIGTERM)
        last = response.read().decode().strip().removeprefix("data: ")
    assert json.loads(last)["error"]["code"] == "engine_unavailable"


async def test_a_silent_stream_has_comments(
    fake_service: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_provider.server.generate, "HEARTBEAT", 0.01)
    app = EngineApp(fake_service(EngineSettings()))
    body = json.dumps({"model": "fake", "prompt": "count 2 0.2", "stream": True}).encode()
    said = b""

    async def receive() -> dict[str, Any]:
        nonlocal body
        if body:
            body, given = b"", body
            return {"type": "http.request", "body": given}
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        nonlocal said
        said += message.get("body", b"")

    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "headers": [(b"content-length", str(len(body)).encode())],
    }
    await app.asgi(scope, receive, send)
    frames = said.decode().split("\n\n")
    assert any(frame.startswith(":") for frame in frames)
    assert all(frame[:1] == ":" or frame.startswith("data: ") for frame in frames if frame)
    assert frames[-2] == "data: [DONE]"


def test_nothing_follows_an_error_in_a_stream() -> None:
    accepted = Accepted(id="r", model="m", prompt_tokens=1, max_tokens=1)
    for failed in (Failed.of(EngineUnavailable("gone")), Finish(reason="cancelled")):
        stream = Stream(accepted, AnswerForm(), usage=False)
        out = stream.feed([Delta(content="a"), failed]) + stream.feed([Delta(content="b")])
        frames = [
            json.loads(frame.removeprefix("data: ")) for frame in out.decode().split("\n\n")[:-1]
        ]
        assert frames[0]["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
        assert frames[1]["error"]["code"] == "engine_unavailable"
        assert len(frames) == 2
