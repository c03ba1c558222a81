"""`/completions` through the real `litellm`: echo, several prompts, log-probabilities."""

import litellm
import pytest

from mlx_provider.errors import BadRequest, ContextTooLong, Overloaded
from mlx_provider.protocol.events import Delta, ErrorBody, Failed, Finish, TokenLogprob


def shout(scripted):
    """Each choice says its prompt loudly, in two steps, and its own number."""

    def script(request):
        text = str(request.prompt).upper()
        return [
            *([Delta(index=i, content=f" {text}")] for i in range(request.n)),
            *([Delta(index=i, content=f"#{i}")] for i in range(request.n)),
            [Finish(index=i, reason="length") for i in range(request.n)],
            [scripted["done"](prompt=5, completion=2 * request.n)],
        ]

    return script


def told(chunks):
    """Text and finish reasons of each choice of a stream, and its stamps."""
    texts, ends = {}, {}
    for choice in (each for chunk in chunks for each in chunk.choices):
        texts[choice.index] = texts.get(choice.index, "") + (choice.text or "")
        if choice.finish_reason:
            ends.setdefault(choice.index, []).append(choice.finish_reason)
    return texts, ends


WANTED = {0: " ONE#0", 1: " ONE#1", 2: " TWO#0", 3: " TWO#1"}


@pytest.mark.parametrize("prompts", [["one", "two"], [[1, 2], [3]], ["one", [3]]])
async def test_several_prompts_give_one_choice_each_and_summed_usage(engine, scripted, prompts):
    engine.script = shout(scripted)
    reply = await litellm.atext_completion(model="mlx/m", prompt=prompts, n=2)
    wanted = [f" {str(prompt).upper()}#{i}" for prompt in prompts for i in range(2)]
    assert [choice.text for choice in reply.choices] == wanted
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in reply.choices} == {"length"}
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (10, 8)
    assert [request.prompt for request in engine.requests] == prompts


async def test_several_prompts_are_streamed_with_one_id_and_summed_usage(engine, scripted):
    engine.script = shout(scripted)
    stream = await litellm.atext_completion(
        model="mlx/m",
        prompt=["one", "two"],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    texts, ends = told(chunks)
    assert texts == WANTED
    assert ends == {index: ["length"] for index in WANTED}
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    usage = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)][-1]
    assert (usage.prompt_tokens, usage.completion_tokens) == (10, 8)


def test_several_prompts_work_in_a_blocking_call_and_stream(engine, scripted):
    engine.script = shout(scripted)
    reply = litellm.text_completion(model="mlx/m", prompt=["one", "two"], n=2)
    assert [choice.text for choice in reply.choices] == list(WANTED.values())
    stream = litellm.text_completion(model="mlx/m", prompt=["one", "two"], n=2, stream=True)
    assert told(stream)[0] == WANTED


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_each_prompt_before_its_text(engine, scripted, stream):
    engine.script = shout(scripted)
    reply = await litellm.atext_completion(
        model="mlx/m", prompt=["one", "two"], echo=True, stream=stream
    )
    texts = (
        told([chunk async for chunk in reply])[0]
        if stream
        else {choice.index: choice.text for choice in reply.choices}
    )
    assert texts == {0: "one ONE#0", 1: "two TWO#0"}


async def test_echo_of_an_empty_reply_is_the_prompt(engine, scripted):
    engine.script = lambda request: [[Finish(reason="stop"), scripted["done"]()]]
    reply = await litellm.atext_completion(model="mlx/m", prompt=[7, 8], echo=True)
    assert reply.choices[0].text == "[7, 8]", "the engine's text of the tokens"


TOKENS = [
    TokenLogprob(token=text, id=7, logprob=-0.5, bytes=[], top=[top])
    for text, top in (
        (" a", TokenLogprob(token=" a", id=7, logprob=-0.5, bytes=[])),
        ("b", TokenLogprob(token="c", id=8, logprob=-0.2, bytes=[])),
    )
]


async def test_completions_logprobs_have_the_legacy_form(engine, scripted):
    engine.script = lambda request: [
        [Delta(content=" ab", logprobs=TOKENS), Finish(reason="stop"), scripted["done"]()]
    ]
    wanted = {
        "tokens": [" a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{" a": -0.5}, {"c": -0.2}],
        "text_offset": [0, 2],
    }
    reply = await litellm.atext_completion(model="mlx/m", prompt="x", logprobs=1)
    assert (engine.request.logprobs, engine.request.top_logprobs) == (True, 1)
    assert reply.choices[0].logprobs.model_dump() == wanted
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (" ab", "stop")
    assert reply.usage.prompt_tokens == 9
    inside = litellm.text_completion(model="mlx/m", prompt="x", logprobs=1)
    assert inside.choices[0].logprobs.model_dump() == wanted


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_contains_those_of_the_prompt(engine, scripted, stream):
    first = TokenLogprob(token="on", id=3, logprob=None, bytes=[])
    engine.script = lambda request: [
        [Delta(logprobs=[first, TOKENS[0]])],
        [Delta(content=" ab", logprobs=TOKENS)],
        [Finish(reason="stop"), scripted["done"]()],
    ]
    reply = await litellm.atext_completion(
        model="mlx/m", prompt="on a", echo=True, logprobs=1, stream=stream
    )
    if stream:
        choices = [c for chunk in [chunk async for chunk in reply] for c in chunk.choices]
    else:
        choices = reply.choices
    found = [choice.logprobs.model_dump() for choice in choices if choice.logprobs is not None]
    joined = {name: [v for each in found for v in each[name]] for name in found[0]}
    assert joined == {
        "tokens": ["on", " a", " a", "b"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {" a": -0.5}, {" a": -0.5}, {"c": -0.2}],
        "text_offset": [0, 2, 4, 6],
    }
    assert "".join(choice.text or "" for choice in choices) == "on a ab"
    assert (engine.request.echo, engine.request.logprobs) == (True, True)


@pytest.mark.parametrize("script", [False, True])
async def test_streamed_completions_logprobs_have_the_legacy_form(engine, scripted, script):
    engine.script = lambda request: [
        [Delta(index=0, content=" a", logprobs=TOKENS[:1]), Delta(index=1, content=" ab")],
        [Delta(index=0, logprobs=TOKENS[1:])],
        [Delta(index=1, content="!", logprobs=TOKENS)],
        [Finish(index=0, reason="stop"), Finish(index=1, reason="stop"), scripted["done"]()],
    ]
    asked = {"model": "mlx/m", "prompt": "x", "logprobs": 1, "n": 2, "stream": True}
    if script:
        chunks = list(litellm.text_completion(**asked))
    else:
        chunks = [chunk async for chunk in await litellm.atext_completion(**asked)]
    found = {0: [], 1: []}
    for choice in (each for chunk in chunks for each in chunk.choices):
        if choice.logprobs is not None:
            found[choice.index].append(choice.logprobs.model_dump())
    assert [each["tokens"] for each in found[0]] == [[" a"], ["b"]]
    assert [each["text_offset"] for each in found[0]] == [[0], [2]]
    assert [each["top_logprobs"] for each in found[0]] == [[{" a": -0.5}], [{"c": -0.2}]]
    assert [each["text_offset"] for each in found[1]] == [[0, 2]]
    assert told(chunks)[0] == {0: " a", 1: " ab!"}


@pytest.mark.parametrize("stream", [False, True])
async def test_one_refused_prompt_cancels_the_other_prompts(engine, stream):
    engine.pause = 0.05
    engine.refuse = lambda request: (
        ContextTooLong("prompt is too long") if request.prompt == "long" else None
    )
    with pytest.raises(litellm.ContextWindowExceededError, match=r"prompt\[1\]: prompt is too"):
        await litellm.atext_completion(model="mlx/m", prompt=["one", "long", "two"], stream=stream)
    assert [request.prompt for request in engine.requests] == ["one", "long"]
    assert not engine.active
    engine.refuse = lambda request: Overloaded("full") if request.prompt == "long" else None
    with pytest.raises(litellm.RateLimitError, match="full"):
        await litellm.atext_completion(model="mlx/m", prompt=["one", "long"], stream=stream)
    assert not engine.active


async def test_one_failed_prompt_cancels_the_other_prompts(engine, until):
    broken = Failed(error=ErrorBody.of(BadRequest("broken")))
    engine.pause = 0.02
    engine.script = lambda request: (
        [[broken]] if request.prompt == "bad" else [[Delta(content="x")]] * 5000
    )
    with pytest.raises(litellm.BadRequestError, match="broken"):
        await litellm.atext_completion(model="mlx/m", prompt=["one", "bad", "two"])
    assert len(engine.requests) == 3
    await until(lambda: not engine.active - {engine.requests[1].id})  # another thread lets go


async def test_a_disconnected_client_cancels_the_requests_of_all_prompts(engine, until):
    engine.pause = 0.02
    engine.script = lambda request: [[Delta(content="x")]] * 5000
    stream = await litellm.atext_completion(model="mlx/m", prompt=["one", "two"], stream=True)
    await anext(stream)
    assert len(engine.active) == 2
    await stream.completion_stream.aclose()
    del stream
    await until(lambda: not engine.active)


@pytest.mark.parametrize("prompt", [[], [[]], [1, "x"], [["x"]], 5, [True], {"a": 1}])
async def test_an_invalid_prompt_is_refused(engine, prompt):
    words = r"prompt.* must be a text(,| or) a list of token"
    with pytest.raises(litellm.BadRequestError, match=words):
        await litellm.atext_completion(model="mlx/m", prompt=prompt)
    assert not engine.requests
