"""The wire as any client sees it: lines, errors, state, disconnects."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from waiting import wait_until


def text_of(lines: list[Any]) -> str:
    return "".join(e.get("content", "") for line in lines for e in line if e["type"] == "delta")


def test_a_reply_begins_with_accepted_and_ends_with_done(engine: Any) -> None:
    lines = engine.lines("count 3 0.01")
    assert lines[0][0]["type"] == "accepted"
    assert lines[0][0]["prompt_tokens"] == 3
    assert text_of(lines) == "0 1 2 "
    assert [event["type"] for event in lines[-1]][-1] == "done"


def test_typed_error_before_the_first_event_has_its_http_status(engine: Any) -> None:
    for code, status in (("context_length_exceeded", 400), ("overloaded", 429)):
        with engine.stream(f"fail {code}") as response:
            body = json.loads(response.read())
        assert response.status_code == status
        assert body == {
            "error": {"code": code, "message": "scripted", "param": "prompt", "status": status}
        }


def test_a_temporary_refusal_has_a_retry_after_header(engine: Any) -> None:
    with engine.stream("fail memory_in_use 4.2") as response:
        body = json.loads(response.read())["error"]
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert body["retry_after"] == 4.2
    with engine.stream("fail overloaded") as response:
        assert "retry-after" not in response.headers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"prompt": 5}, "prompt"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"messages": [{"role": "user"}, 3]}, "messages.1"),
    ],
)
def test_bad_fields_are_refused_by_name(engine: Any, fields: dict[str, Any], param: str) -> None:
    response = engine.http.post("/v1/generate", json={"model": "fake", "prompt": "x", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_request", param)
    assert error["message"].startswith(param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused(engine: Any, body: bytes) -> None:
    response = engine.http.post("/v1/generate", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"


def test_an_unexpected_error_is_a_500_without_details(engine: Any) -> None:
    with engine.stream("bug") as response:
        body = json.loads(response.read())
    assert (response.status_code, body["error"]["code"]) == (500, "internal_error")
    assert "scripted bug" not in str(body)
    assert engine.lines("count 1 0")


def test_the_state_routes_report_process_models_metrics_and_cache(engine: Any) -> None:
    health = engine.http.get("/health")
    assert health.status_code == 200
    for state in (health, engine.http.get("/v1/stats")):
        assert state.json()["pid"] == engine.process.pid
    assert health.json()["blas"]
    assert health.json()["blas"] in engine.line
    models = engine.http.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["fake"]
    metrics = engine.http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert b"mlx_provider_requests_received_total" in metrics.content
    engine.lines("count 1 0")
    assert engine.seen()["finished"]
    assert engine.http.delete("/cache").status_code == 200
    assert engine.seen()["finished"] == []


def test_a_disconnected_client_cancels_only_its_request(engine: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(engine.lines, "count 40 0.01", id="stays")
        with engine.stream("wait", id="leaves") as response:
            pieces = response.iter_raw()
            next(pieces)
        engine.await_seen("cancelled", "leaves")
        assert text_of(other.result()).split() == [str(n) for n in range(40)]
    assert "stays" not in engine.seen()["cancelled"]


def test_a_client_that_leaves_during_submit_cancels_its_request(spawn: Any) -> None:
    engine = spawn()
    with engine.connected("POST", "/v1/generate", model="fake", prompt="gate", id="impatient"):
        engine.await_seen("submitted", "impatient")
    engine.http.delete("/cache")
    engine.await_seen("cancelled", "impatient")


def test_a_refused_request_does_not_cancel_its_id(engine: Any) -> None:
    with engine.stream("fail invalid_request", id="refused") as response:
        response.read()
    engine.lines("count 1 0")
    assert "refused" not in engine.seen()["cancelled"]


def test_256_blocked_submits_do_not_starve_others(spawn: Any) -> None:
    engine = spawn()
    with ThreadPoolExecutor(256) as pool:
        slow = [pool.submit(engine.lines, "gate", id=str(n)) for n in range(256)]
        wait_until(lambda: len(engine.seen()["submitted"]) == 256)
        engine.lines("count 1 0", id="quick")
        assert not any(future.done() for future in slow)
        engine.http.delete("/cache")
        assert all(future.result()[-1][-1]["type"] == "done" for future in slow)


def test_attach_reports_the_engine_process_and_stays_open(engine: Any) -> None:
    with engine.http.stream("GET", "/v1/attach") as response:
        first = next(response.iter_raw())
        assert json.loads(first)["pid"] == engine.process.pid
    with engine.connected("GET", "/v1/attach") as client:
        told = b""
        while b'"pid"' not in told or not told.endswith(b"\r\n"):
            told += client.recv(65536)
        engine.lines("count 20 0.01")
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)


KEY = "k" * 32
LISTENER = {"key": KEY, "model": "fake", "max_tokens": 5}


@pytest.fixture
def listener(engine: Any) -> Iterator[tuple[httpx.Client, httpx.Response]]:
    """A client of the listener, and the reply that holds it open."""
    with engine.http.stream("POST", "/v1/listener", json=LISTENER) as held:
        lines = held.iter_lines()  # httpx closes the reply of an iterator that is gone
        url = next(lines)
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=120) as http:
            yield http, held


def asked(http: httpx.Client, said: str, **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": said}]
    return http.post("/v1/chat/completions", json={"messages": messages, **more})


def test_a_listener_serves_its_model_under_every_name(listener: Any) -> None:
    http, _ = listener
    for name in ("fake", "gpt-x", "/etc", None):
        reply = asked(http, "count 1 0", model=name)
        assert reply.json()["model"] == "fake", reply.text
    assert http.get("/v1/models").json()["data"][0]["id"] == "fake"


def test_a_listener_needs_its_own_key(listener: Any) -> None:
    http, _ = listener
    for headers, status in (
        ({"authorization": "Bearer " + "l" * 32}, 401),
        ({"authorization": ""}, 401),
        ({"origin": "http://localhost"}, 403),
        ({"host": "page.example"}, 403),
    ):
        reply = http.post("/v1/messages", headers=headers, json={})
        assert (reply.status_code, reply.json()["type"]) == (status, "error")


def test_a_listener_does_not_serve_the_routes_of_the_owner(listener: Any) -> None:
    http, _ = listener
    for path in (
        "stop",
        "listener",
        "generate",
        "embed",
        "embeddings",
        "count",
        "attach",
        "rerank",
        "score",
    ):
        assert http.post(f"/v1/{path}", json={}).status_code == 404, path
    assert http.delete("/cache").status_code == 404


def test_a_listener_closes_with_the_connection_that_opened_it(engine: Any, listener: Any) -> None:
    http, held = listener
    body = {"messages": [{"role": "user", "content": "wait"}], "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        held.close()
        with pytest.raises(httpx.TransportError):
            reply.read()
    engine.await_seen("cancelled", engine.seen()["submitted"][-1])
    with pytest.raises(httpx.ConnectError):
        http.get("/v1/models")


def test_a_wrong_request_for_a_listener_is_refused_without_the_key(engine: Any) -> None:
    for fault in ({"key": "short"}, {"key": KEY + " "}, {"more": 1}):
        refused = engine.http.post("/v1/listener", json=LISTENER | fault)
        assert refused.status_code == 400
        assert KEY not in refused.text
