"""What the engine's door refuses on the routes of other APIs."""

from typing import Any

import httpx
import pytest

from mlx_provider.wire import ROUTES

PATHS = [*ROUTES]


def post(engine: Any, path: str, content: bytes = b"{}", **headers: str) -> httpx.Response:
    kind = {"content-type": "application/json"}
    return httpx.post(
        engine.url + path, content=content, headers=kind | headers, trust_env=False, timeout=300
    )


@pytest.mark.parametrize("path", PATHS)
def test_a_request_without_the_key_is_refused_by_its_headers(engine: Any, path: str) -> None:
    right = {"authorization": "Bearer the-key"}
    for headers, status in (
        ({}, 401),
        ({"authorization": "Bearer the-kex"}, 401),
        ({"authorization": "the-key"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "the-kex"}, 401),
        ({**right, "origin": "http://localhost"}, 403),
        ({**right, "host": "page.example"}, 403),
        ({**right, "content-type": "text/plain"}, 415),
    ):
        answer = post(engine, path, **headers)
        assert answer.status_code == status, headers
        assert answer.json()["error"]["message"]
        assert answer.headers["connection"] == "close"
    for headers in (right, {"authorization": "bearer  the-key"}, {"x-api-key": "the-key"}):
        assert post(engine, path, **headers).status_code == 400


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"3", 400),
        (b"\xff", 400),
        (b"[" * 100_000, 400),
        (b'{"model": "m", "messages": [' + b"{}," * 2**17 + b"{}]}", 400),
        (b" " * (2**22 + 1), 413),
    ],
)
def test_a_malformed_body_is_refused(engine: Any, path: str, body: bytes, status: int) -> None:
    answer = post(engine, path, body, authorization="Bearer the-key")
    assert answer.status_code == status
    assert answer.json()["error"]["type"] in ("invalid_request_error", "request_too_large")
    assert engine.http.get("/health").status_code == 200


FIELDS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "x"},
    "/v1/embeddings": {"input": "x"},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "x", "max_output_tokens": 1},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.mark.parametrize("path", PATHS)
def test_a_remote_client_can_name_only_models_under_the_roots(engine: Any, path: str) -> None:
    answers = [
        engine.http.post(path, json={"model": model, **FIELDS[path]})
        for model in (engine.vectors, engine.outside)
    ]
    assert [answer.status_code for answer in answers] == [200, 404], answers[1].text


def test_a_route_that_is_not_served_is_not_found(engine: Any) -> None:
    for path in ("/v1/rerank", "/v1/score", "/v1/nothing"):
        assert engine.http.post(path, json={"model": engine.vectors}).status_code == 404, path
