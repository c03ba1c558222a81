"""What a tracer of OpenTelemetry gets of a request, within LiteLLM's own trace."""

import litellm
import pytest

from mlx_provider.errors import RequestFailed
from mlx_provider.protocol.events import Delta, Done, Failed, Finish, Timings, Usage

pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra otel")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

HI = [{"role": "user", "content": "Where is the vault?"}]
TIMES = Timings(queued=1.0, prefill=2.0, first_token=3.0, total=7.0, tokens_per_second=10.0)
SECOND = 1_000_000_000


@pytest.fixture
def spans(monkeypatch):
    """Those that were made, as if LiteLLM's callback had set the provider up."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    exporter.tracer = provider.get_tracer("litellm")
    return exporter


@pytest.fixture
def timed(engine):
    usage = Usage(prompt_tokens=9, cached_tokens=5, completion_tokens=40)
    engine.script = lambda request: [
        [Delta(content="Hello")],
        [Finish(reason="stop"), Done(usage=usage, timings=TIMES)],
    ]
    return engine


def by_name(spans):
    return {span.name.removeprefix("mlx_provider "): span for span in spans.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("slot", ["metadata", "litellm_metadata"])
async def test_parts_stand_in_the_trace_of_the_request(timed, spans, stream, slot):
    parent = spans.tracer.start_span("Received Proxy Server Request")
    reply = await litellm.acompletion(
        model="mlx/m", messages=HI, stream=stream, **{slot: {"litellm_parent_otel_span": parent}}
    )
    if stream:
        assert [chunk async for chunk in reply]
    found = by_name(spans)
    assert found.keys() == {"request", "queue", "prefill", "decode"}
    request = found["request"]
    assert request.parent.span_id == parent.get_span_context().span_id
    assert {span.context.trace_id for span in found.values()} == {request.context.trace_id}
    for name, start, end in (("queue", 0, 1), ("prefill", 1, 3), ("decode", 3, 7)):
        part = found[name]
        assert part.parent.span_id == request.context.span_id
        assert part.start_time - request.start_time == start * SECOND
        assert part.end_time - request.start_time == end * SECOND
    assert request.end_time - request.start_time == 7 * SECOND
    assert request.attributes["gen_ai.request.model"] == "m"
    assert request.attributes["gen_ai.usage.output_tokens"] == 40
    assert request.attributes["mlx_provider.cached_tokens"] == 5
    assert "vault" not in "".join(span.to_json() for span in found.values())


def test_a_script_has_its_own_span_as_parent(timed, spans):
    with trace.use_span(spans.tracer.start_span("agent"), end_on_exit=True) as agent:
        litellm.completion(model="mlx/m", messages=HI)
    assert by_name(spans)["request"].parent.span_id == agent.get_span_context().span_id


def test_an_error_and_an_answer_that_nobody_reads(engine, spans):
    engine.script = lambda request: [[Failed.of(RequestFailed("its text failed"))]]
    with pytest.raises(litellm.InternalServerError):
        litellm.completion(model="mlx/m", messages=HI)
    failed = by_name(spans)["request"]
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert failed.attributes["error.type"] == "request_failed"
    spans.clear()
    engine.script = lambda request: [[Delta(content="Hello")] for _ in range(1000)]
    stream = litellm.completion(model="mlx/m", messages=HI, stream=True)
    next(stream)
    stream.completion_stream.close()
    assert by_name(spans).keys() == {"request"}


def test_a_tracer_that_fails_disturbs_no_answer(timed, spans, monkeypatch):
    def broken(name):
        raise OSError("no collector")

    monkeypatch.setattr(trace, "get_tracer", broken)
    reply = litellm.completion(model="mlx/m", messages=HI)
    assert reply.choices[0].message.content == "Hello"
