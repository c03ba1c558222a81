"""`timings: true`: where a request's time went, in what LiteLLM passes on as usage."""

import litellm
import pytest

HI = [{"role": "user", "content": "hi"}]
USAGE = {"include_usage": True}


def told(usage):
    return getattr(usage.completion_tokens_details, "timings", None)


def test_a_whole_answer(engine, scripted):
    reply = litellm.completion(model="mlx/m", messages=HI, timings=True)
    assert told(reply.usage) == scripted["timings"].model_dump()
    assert reply.usage.completion_tokens == 3


async def test_streams(engine, scripted):
    expected = scripted["timings"].model_dump()
    asked = {"model": "mlx/m", "messages": HI, "stream": True, "stream_options": USAGE}
    *_, last = litellm.completion(**asked, timings=True)
    assert told(last.usage) == expected
    chunks = [chunk async for chunk in await litellm.acompletion(**asked, timings=True)]
    assert told(chunks[-1].usage) == expected
    text = await litellm.atext_completion(model="mlx/m", prompt="hi", timings=True)
    assert told(text.usage) == expected


def test_nobody_else_gets_them(engine):
    assert told(litellm.completion(model="mlx/m", messages=HI).usage) is None
    assert told(litellm.completion(model="mlx/m", messages=HI, timings=False).usage) is None
    with pytest.raises(litellm.BadRequestError, match="timings must be true or false"):
        litellm.completion(model="mlx/m", messages=HI, timings="yes")
