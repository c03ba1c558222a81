"""One trace from the client to the engine's decode: a real proxy with LiteLLM's callback `otel`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlx_provider.gateway.config import proxy_config, write_config
from mlx_provider.gateway.proxy import Proxy, start_proxy

pytestmark = pytest.mark.otel

PARTS = {"request", "queue", "prefill", "decode"}
SAID = "Where is the vault?"
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SAID}]},
    "/v1/responses": {"input": SAID},
    "/v1/messages": {"messages": [{"role": "user", "content": SAID}], "max_tokens": 20},
    "/v1/completions": {"prompt": SAID},
}


@pytest.fixture(scope="module")
def traced(scripted_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """It writes spans into its log, as JSON."""
    config = proxy_config(
        "scripted", "any", api_base=scripted_engine.url, api_key="engine-key-of-the-tests"
    )
    config["litellm_settings"]["callbacks"] = ["otel"]
    environ = {**os.environ, "OTEL_EXPORTER": "console", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    running = start_proxy(write_config(config, tmp_path_factory.mktemp("traced")), environ)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


def spans_of(proxy: Proxy, trace: str) -> dict[str, Any]:
    """Our spans of a trace by name, and its others under `None`."""
    log, at, found = proxy.log.read_text(), 0, {}
    while (at := log.find('{\n    "name": ', at)) >= 0:
        try:
            span, length = json.JSONDecoder().raw_decode(log[at:])
        except ValueError:  # it is being written
            break
        at += length
        if span["context"]["trace_id"] == f"0x{trace}":
            name = span["name"]
            ours = name.startswith("mlx_provider ")
            found.setdefault(name.removeprefix("mlx_provider ") if ours else None, []).append(span)
    return found


def await_spans(proxy: Proxy, trace: str) -> dict[str, Any]:
    """Once the one under which ours hang is there, too: it ends after them."""
    deadline = time.monotonic() + 60
    while not _joined(found := spans_of(proxy, trace)):
        assert time.monotonic() < deadline, "ours do not hang under a span of LiteLLM's"
        time.sleep(0.2)
    return found


def _joined(found: dict[Any, Any]) -> bool:
    theirs = {span["context"]["span_id"] for span in found.get(None, ())}
    return found.keys() >= PARTS and found["request"][0]["parent_id"] in theirs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CALLS)
def test_the_clients_trace_goes_on_to_the_engine(traced: Proxy, path: str, stream: bool) -> None:
    trace, parent = os.urandom(16).hex(), os.urandom(8).hex()
    headers = {
        "authorization": f"Bearer {traced.key}",
        "traceparent": f"00-{trace}-{parent}-01",
        "anthropic-version": "2023-06-01",
    }
    body = {"model": "scripted", "stream": stream, **CALLS[path]}
    with httpx.Client(base_url=traced.url, trust_env=False, timeout=300) as http:
        answer = http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found = await_spans(traced, trace)
    (request,) = found["request"]
    for name in PARTS - {"request"}:
        (part,) = found[name]
        assert part["parent_id"] == request["context"]["span_id"]
    assert request["attributes"]["gen_ai.request.model"] == "any"
