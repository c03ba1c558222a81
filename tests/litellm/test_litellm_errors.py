"""Our errors through LiteLLM: class, status, routing, and no traceback for anyone."""

import time

import litellm
import pytest
from litellm import Router
from litellm.exceptions import (
    BadRequestError,
    ContextWindowExceededError,
    InternalServerError,
    MidStreamFallbackError,
    NotFoundError,
    RateLimitError,
    ServiceUnavailableError,
    Timeout,
    UnprocessableEntityError,
)

from mlx_provider import errors
from mlx_provider.litellm.errors import to_litellm
from mlx_provider.protocol.events import Delta, ErrorBody, Failed, Finish

HI = [{"role": "user", "content": "hi"}]

TABLE = [
    (errors.BadRequest, BadRequestError, 400),
    (errors.BodyTooLarge, BadRequestError, 413),
    (errors.Forbidden, BadRequestError, 400),
    (errors.WrongContentType, BadRequestError, 400),
    (errors.UnsupportedModel, BadRequestError, 400),
    (errors.MediaError, BadRequestError, 400),
    (errors.GrammarFailed, BadRequestError, 400),
    (errors.ContextTooLong, ContextWindowExceededError, 400),
    (errors.Unauthorized, ServiceUnavailableError, 503),
    (errors.ModelNotFound, NotFoundError, 404),
    (errors.RequestTimedOut, Timeout, 408),
    (errors.Overloaded, RateLimitError, 429),
    (errors.RequestFailed, InternalServerError, 500),
    (errors.EngineUnavailable, ServiceUnavailableError, 503),
    (errors.EngineDied, ServiceUnavailableError, 503),
    (errors.OtherProtocol, ServiceUnavailableError, 503),
    (errors.LoadFailed, ServiceUnavailableError, 503),
    (errors.MemoryInUse, ServiceUnavailableError, 503),
    (errors.NotInstalled, ServiceUnavailableError, 503),
    (errors.PluginError, UnprocessableEntityError, 422),
    (errors.MLXProviderError, InternalServerError, 500),
]


def test_every_error_class_has_a_litellm_class_in_the_table():
    assert {ours for ours, _, _ in TABLE} == set(errors.error_classes().values())


@pytest.mark.parametrize(("ours", "theirs", "status"), TABLE)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_raised_before_the_first_chunk(engine, ours, theirs, status, stream):
    engine.refuse = lambda request: ours("the very reason")
    with pytest.raises(theirs) as caught:
        await litellm.acompletion(model="mlx/m", messages=HI, stream=stream)
    assert type(caught.value) is theirs
    assert caught.value.status_code == status
    assert "the very reason" in str(caught.value)
    assert "Traceback" not in str(caught.value)


async def test_the_router_retries_after_the_retry_after_of_the_error(engine):
    asked = []

    def refuse(request):
        asked.append(time.monotonic())
        return errors.MemoryInUse("others are in use", retry_after=1.2)

    engine.refuse = refuse
    router = Router(
        model_list=[{"model_name": "m", "litellm_params": {"model": "mlx/m"}}], num_retries=1
    )
    with pytest.raises(ServiceUnavailableError):
        await router.acompletion(model="m", messages=HI)
    first, second = asked
    assert second - first >= 2  # whole seconds; by itself it would wait for less than one


def test_an_unexpected_error_shows_details_only_in_the_log(caplog):
    theirs = to_litellm(KeyError("/secret/path"), "m")
    assert isinstance(theirs, InternalServerError)
    assert "secret" not in str(theirs)
    assert "/secret/path" in caplog.text, "the operator's log has it"


async def test_a_failure_in_mid_stream_raises_a_fallback_error_with_its_cause(engine):
    engine.script = lambda request: [
        [Delta(content="x")],
        [Failed(error=ErrorBody(code="engine_died", message="the engine died"))],
    ]
    stream = await litellm.acompletion(model="mlx/m", messages=HI, stream=True)
    with pytest.raises(MidStreamFallbackError, match="the engine died") as caught:
        [chunk async for chunk in stream]
    assert isinstance(caught.value.original_exception, ServiceUnavailableError)
    assert "Traceback" not in str(caught.value)
    assert not engine.active - {engine.request.id}


DEPLOYMENTS = [
    {"model_name": "a", "litellm_params": {"model": "mlx/small"}},
    {"model_name": "b", "litellm_params": {"model": "mlx/big"}},
]


def small_is_too_small(request):
    return errors.ContextTooLong("too long") if request.model == "small" else None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_context_uses_the_fallback_model(engine, stream):
    engine.refuse = small_is_too_small
    router = Router(model_list=DEPLOYMENTS, context_window_fallbacks=[{"a": ["b"]}], num_retries=0)
    reply = await router.acompletion(model="a", messages=HI, stream=stream)
    if stream:
        text = "".join([c.choices[0].delta.content or "" async for c in reply])
    else:
        text = reply.choices[0].message.content
    assert text == "Hello world!"
    assert [request.model for request in engine.requests] == ["small", "big"]


async def test_a_request_cancelled_by_the_engine_is_an_error(engine):
    engine.script = lambda request: [[Finish(reason="cancelled")]]
    with pytest.raises(ServiceUnavailableError):
        await litellm.acompletion(model="mlx/m", messages=HI)
