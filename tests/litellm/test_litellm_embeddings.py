"""`/embeddings` through the real `litellm`: OpenAI's parameters, forms of vectors, endings."""

import asyncio
from base64 import b64encode
from struct import pack

import litellm
import pytest

from mlx_provider.errors import BadRequest, ContextTooLong, EngineDied, Overloaded
from mlx_provider.protocol.events import Embedded, ErrorBody, Failed

VECTORS = [[0.5, -0.25], [1.0, 0.0], [0.1, 3e38]]


def vector(values):
    return b64encode(pack(f"<{len(values)}f", *values)).decode()


@pytest.fixture
def engine(engine, scripted):
    """Answers each input with a vector, the last one first."""

    def script(request):
        made = [Embedded(index=i, vector=vector(VECTORS[i % 3])) for i in range(len(request.input))]
        return [*([each] for each in made[::-1]), [scripted["done"](prompt=5, completion=0)]]

    engine.script = script
    return engine


@pytest.mark.parametrize("drop", [False, True])
async def test_dimensions_and_encoding_format_of_openai_are_honoured(engine, monkeypatch, drop):
    monkeypatch.setattr(litellm, "drop_params", drop)
    asked = {"dimensions": 2, "encoding_format": "base64", "user": "someone"}
    found = await litellm.aembedding(model="mlx/org/m", input=["a", "b"], **asked)
    assert [each["index"] for each in found.data] == [0, 1]
    assert found.data[0]["embedding"] == vector(VECTORS[0])
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (5, 5)
    assert (found.object, found.model) == ("list", "org/m")
    assert (engine.request.model, engine.request.input) == ("org/m", ["a", "b"])
    assert engine.request.dimensions == 2
    floats = await litellm.aembedding(model="mlx/m", input="a", encoding_format="float")
    assert floats.data[0]["embedding"] == VECTORS[0]
    assert not engine.active


@pytest.mark.parametrize(
    ("given", "sent"),
    [("a", ["a"]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]]), (["a", [5]], ["a", [5]])],
)
async def test_every_form_of_an_embedding_input_reaches_the_engine(engine, given, sent):
    await litellm.aembedding(model="mlx/m", input=given)
    assert engine.request.input == sent
    assert litellm.embedding(model="mlx/m", input=given).data
    assert engine.request.input == sent


@pytest.mark.parametrize(
    "more",
    [
        {"input": 5},
        {"input": None},
        {"input": [5, "a"]},
        {"input": [True]},
        {"dimensions": "many"},
        {"encoding_format": ""},
        {"encoding_format": ["float"]},
        {"prompt_name": 5},
    ],
)
async def test_invalid_embedding_parameters_are_refused_by_name(engine, more):
    with pytest.raises(litellm.BadRequestError, match=next(iter(more))):
        await litellm.aembedding(**{"model": "mlx/m", "input": "a", **more})
    assert not engine.requests


@pytest.mark.parametrize("drop", [False, True])
def test_a_blocking_embedding_call_honours_dimensions_and_format(engine, monkeypatch, drop):
    monkeypatch.setattr(litellm, "drop_params", drop)
    more = {"dimensions": 2, "encoding_format": "base64", "user": "someone"}
    found = litellm.embedding(model="mlx/m", input="a", **more)
    assert found.data[0]["embedding"] == vector(VECTORS[0])
    assert engine.request.dimensions == 2


def test_embedding_parameters_of_other_providers_are_still_refused():
    given = {"model": "m", "custom_llm_provider": "huggingface", "dimensions": 2}
    with pytest.raises(litellm.UnsupportedParamsError, match="dimensions"):
        litellm.main.get_optional_params_embeddings(**given)


@pytest.mark.parametrize(
    ("error", "theirs"),
    [
        (BadRequest("cannot embed"), litellm.BadRequestError),
        (ContextTooLong("input[0] is too long"), litellm.ContextWindowExceededError),
        (Overloaded("full"), litellm.RateLimitError),
        (EngineDied("gone"), litellm.ServiceUnavailableError),
    ],
)
async def test_engine_errors_of_embeddings_become_litellm_classes(engine, error, theirs):
    engine.refuse = lambda request: error
    with pytest.raises(theirs, match=error.message.partition("[")[0]):
        await litellm.aembedding(model="mlx/m", input="a", max_retries=0)
    engine.refuse = lambda request: None
    engine.script = lambda request: [[Failed(error=ErrorBody.of(error))]]
    with pytest.raises(theirs):
        litellm.embedding(model="mlx/m", input="a", max_retries=0)


async def test_a_cancelled_or_timed_out_embedding_is_cancelled_in_the_engine(engine, until):
    engine.pause = 0.02
    engine.script = lambda request: [[Embedded(index=0, vector=vector([1.0]))]] * 500
    task = asyncio.create_task(litellm.aembedding(model="mlx/m", input=["a"] * 500))
    await until(lambda: engine.active)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not engine.active)  # its thread may still be at work
    with pytest.raises(litellm.Timeout):
        await litellm.aembedding(model="mlx/m", input=["a"] * 500, timeout=0.1, max_retries=0)
    await until(lambda: not engine.active)


async def test_litellm_lists_an_embedding_model_with_its_context(engine):
    engine.context_length = 777
    await litellm.aembedding(model="mlx/shown-as-embedding", input="a")
    known = litellm.get_model_info("mlx/shown-as-embedding")
    assert (known["mode"], known["max_input_tokens"]) == ("embedding", 777)
