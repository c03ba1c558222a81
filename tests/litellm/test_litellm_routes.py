"""Who is told of a full context by an event of the stream, and who by a status."""

import sys
from types import SimpleNamespace

import litellm
import pytest

from mlx_provider.errors import ContextTooLong
from mlx_provider.litellm.call import reads_errors_in_streams

PROXY = "litellm.proxy.proxy_server"


def called(path, body=None, group="local"):
    metadata = {"user_api_key_request_route": path, "model_group": group}
    return {"metadata": metadata, "proxy_server_request": {"body": body or {}}}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (called("/v1/responses"), True),
        (called("/responses"), True),
        (called("/v1/chat/completions"), False),
        (called("/v1/messages"), False),
        ({}, False),
        (called("/v1/responses", {"fallbacks": ["other"]}), False),
    ],
)
def test_only_streamed_responses_routes_report_errors_inside_the_stream(given, told):
    assert reads_errors_in_streams(given) is told


@pytest.mark.parametrize(
    ("fallbacks", "told"),
    [([], True), ([{"other": ["x"]}], True), ([{"local": ["x"]}], False), ([{"*": ["x"]}], False)],
)
@pytest.mark.parametrize("name", ["context_window_fallbacks", "fallbacks"])
def test_a_router_with_fallbacks_gets_errors_as_exceptions(monkeypatch, name, fallbacks, told):
    lists = {"context_window_fallbacks": None, "fallbacks": None, name: fallbacks}
    module = SimpleNamespace(llm_router=litellm.Router(model_list=[], **lists))
    monkeypatch.setitem(sys.modules, PROXY, module)
    assert reads_errors_in_streams(called("/v1/responses")) is told


async def test_a_script_gets_a_full_context_as_an_exception(engine):
    engine.refuse = lambda request: ContextTooLong.of(9000, 2048)
    with pytest.raises(litellm.ContextWindowExceededError) as caught:
        await litellm.aresponses(model="mlx/x", input="hi", stream=True)
    assert caught.value.code == "context_length_exceeded"
