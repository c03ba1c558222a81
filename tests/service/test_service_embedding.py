"""Embeddings of a service: files of the model, options of the operator, requests of clients."""

import json
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from in_process import InProcessClient
from mlx_provider.errors import BadRequest, ContextTooLong, MLXProviderError, RequestFailed
from mlx_provider.protocol.events import Done, Embedded, Event, Failed
from mlx_provider.protocol.requests import EmbedRequest, GenerateRequest, ModelOptions, Sampling
from mlx_provider.serving.service import ChatService
from mlx_provider.settings import EngineSettings
from tiny import build
from tiny_embedding import ENDS, as_embedding, without_head
from tolerances import logprob_tolerance

Ask = Callable[..., tuple[list[Any], int]]
LIMIT = 300


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_embedding(build(tmp_path_factory.mktemp("embed") / "m", "qwen3"))


@pytest.fixture(scope="module")
def service() -> Iterator[ChatService]:
    """Without layouts to try, a model loads in a tenth of the time."""
    service = ChatService(EngineSettings(kv_layout="solo"))
    yield service
    service.close()


@pytest.fixture(scope="module")
def client(service: ChatService) -> InProcessClient:
    return InProcessClient(service)


@pytest.fixture(scope="module")
def ask(client: InProcessClient) -> Ask:
    """Vectors and counted tokens."""

    def ask(model: Path, *inputs: Any, **more: Any) -> tuple[list[Any], int]:
        request = EmbedRequest(model=str(model), input=list(inputs), **more)
        generation = client.submit(request)
        events: list[Event] = []
        while found := generation.get(LIMIT):
            events += found
        *vectors, last = events
        if isinstance(last, Failed):
            raise last.error.exception()
        assert isinstance(last, Done)
        made = {each.index: each.vector for each in vectors if isinstance(each, Embedded)}
        arrays = [np.frombuffer(b64decode(made[i]), "<f4") for i in range(len(made))]
        return arrays, last.usage.prompt_tokens

    return ask


def refused(ask: Ask, model: Path, *inputs: Any, **more: Any) -> MLXProviderError:
    with pytest.raises(BadRequest) as caught:
        ask(model, *inputs, **more)
    return caught.value


def test_a_text_and_its_token_ids_give_the_same_unit_vector(ask: Ask, embedder: Path) -> None:
    texts, count = ask(embedder, "Hello there", "The quick brown fox")
    assert [round(float(np.linalg.norm(each)), 5) for each in texts] == [1, 1]
    ids = json.loads((embedder / "tokenizer.json").read_text())
    end = next(t["id"] for t in ids["added_tokens"] if t["content"] == ENDS)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(embedder / "tokenizer.json"))
    tokens = tokenizer.encode("Hello there").ids
    assert tokens[-1] == end, "as sentence-transformers tokenises it"
    (same,), counted = ask(embedder, tokens)
    assert same.tobytes() == texts[0].tobytes()
    assert count > counted == len(tokens)


def test_a_text_gets_the_prompt_of_the_model(ask: Ask, embedder: Path) -> None:
    (plain,), _ = ask(embedder, "fox")
    (query,), counted = ask(embedder, "fox", prompt_name="query")
    (written,), same = ask(embedder, "Instruct: find it\nQuery: fox")
    assert (counted, query.tobytes()) == (same, written.tobytes())
    assert ask(embedder, "fox", prompt_name="document")[0][0].tobytes() == plain.tobytes()
    error = refused(ask, embedder, "fox", prompt_name="nobody")
    assert (error.param, "it has: document, query" in error.message) == ("prompt_name", True)


def test_a_control_token_in_a_text_becomes_plain_text(ask: Ask, embedder: Path) -> None:
    _, one = ask(embedder, "a")
    _, spelt = ask(embedder, f"a{ENDS}")
    assert spelt > one + 3


def test_an_invalid_input_is_refused_with_its_index(ask: Ask, embedder: Path) -> None:
    for inputs, more, error, words in (
        (["a", ""], {}, BadRequest, "input[1]: it is empty"),
        ([[]], {}, BadRequest, "input[0]: it is empty"),
        (["a", [3, 9999]], {}, BadRequest, "input[1]: token id 9999 is not within 0 .. 383"),
        ([[-1]], {}, BadRequest, "token id -1"),
        ([[2**70]], {}, BadRequest, "is not within"),
        (["a"], {"dimensions": 10**9}, BadRequest, "dimensions must be at most 64"),
        (["a", "b " * 40_000], {}, ContextTooLong, "input[1]"),
        (["a", [40] * 32768], {}, ContextTooLong, "input[1] is too long: 32768 tokens > 32767"),
        (["x" * 10_000_000], {}, ContextTooLong, "input[0]"),
    ):
        found = refused(ask, embedder, *inputs, **more)
        assert type(found) is error
        assert words in found.message


def test_an_embedding_of_too_much_is_refused(ask: Ask, embedder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("mlx_provider.serving.prepared.MAX_INPUT_TOKENS", 100)
    assert "send it in several requests" in refused(ask, embedder, *[[40] * 30] * 4).message


def test_a_model_without_embedding_files_needs_the_pooling_option(ask: Ask, tmp_path: Path) -> None:
    folder = build(tmp_path / "m", "qwen3")
    assert "let the operator choose model_info.mlx.pooling" in refused(ask, folder, "a").message
    (last,), _ = ask(folder, "Hello there", options=ModelOptions(pooling="last"))
    (mean,), _ = ask(folder, "Hello there", options=ModelOptions(pooling="mean"))
    assert np.linalg.norm(last - mean) > 0.1


def test_health_lists_the_models_that_embed(
    ask: Ask, client: InProcessClient, embedder: Path, tmp_path: Path
) -> None:
    ask(embedder, "fox")
    refused(ask, folder := build(tmp_path / "m", "qwen3"), "fox")
    told = {each.model: each.pooling for each in client.health().models}
    assert (told[str(embedder)], told[str(folder)]) == ("last", None)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("modules.json", "{"),
        ("1_Pooling/config.json", "[]"),
        ("config_sentence_transformers.json", "{"),
    ],
)
def test_a_broken_file_is_a_reason_not_to_embed(
    ask: Ask, client: InProcessClient, tmp_path: Path, name: str, content: str
) -> None:
    folder = as_embedding(build(tmp_path / "m", "qwen3"))
    (folder / name).write_text(content)
    assert name in refused(ask, folder, "a").message
    chat = GenerateRequest(model=str(folder), prompt="fox", max_tokens=1)
    assert client.submit(chat).get(LIMIT)


def test_unknown_values_in_files_are_ignored(ask: Ask, tmp_path: Path) -> None:
    folder = as_embedding(build(tmp_path / "m", "qwen3"))
    (folder / "modules.json").write_text('{"a": [1]}')
    odd = {"prompts": ["a", 1], "default_prompt_name": ["a"]}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(odd))
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    assert len(ask(folder, "fox")[0]) == 1


@pytest.mark.parametrize(
    ("how", "config", "words"),
    [
        ({"others": ("Dense",)}, {}, "what follows it is not supported: Dense"),
        ({"mode": "max_tokens"}, {}, "its pooling is not supported: max_tokens"),
        ({}, {"use_bidirectional_attention": True}, "attend to both sides"),
        ({}, {"is_causal": False}, "attend to both sides"),
    ],
)
def test_a_model_that_cannot_embed_is_refused_with_the_reason(
    ask: Ask, tmp_path: Path, how: Any, config: Any, words: str
) -> None:
    folder = as_embedding(build(tmp_path / "m", "qwen3", **config), **how)
    found = refused(ask, folder, "a")
    assert f"{folder} cannot embed: " in found.message
    assert words in found.message
    assert found.param == "model"


def test_a_backbone_without_output_matrix_embeds(ask: Ask, tmp_path: Path, embedder: Path) -> None:
    folder = without_head(as_embedding(build(tmp_path / "m", "qwen3"), "mean_tokens"))
    (found,), _ = ask(folder, "Hello there")
    (whole,), _ = ask(embedder, "Hello there", options=ModelOptions(pooling="mean"))
    np.testing.assert_allclose(
        found, whole, atol=logprob_tolerance()
    )  # chunks are cut by measured times


def test_vision_models_embed_text(ask: Ask, tmp_path: Path) -> None:
    last = ModelOptions(pooling="last")
    folder = build(tmp_path / "m", "qwen3_vl")
    (one,), _ = ask(folder, "Hello there " * 30, options=last)
    (other, _), _ = ask(folder, "Hello there " * 30, "fox", options=last)
    assert one.tobytes() == other.tobytes()
    found = refused(ask, build(tmp_path / "g", "gemma3"), "a", options=last)
    assert "family 'gemma3' shows no hidden states" in found.message


def test_a_reproducible_model_gives_nearly_the_usual_vectors(ask: Ask, embedder: Path) -> None:
    (plain,), _ = ask(embedder, "Hello there")
    (fixed,), _ = ask(embedder, "Hello there", options=ModelOptions(reproducible=True))
    np.testing.assert_allclose(fixed, plain, atol=logprob_tolerance())


def test_a_stream_goes_on_beside_vectors_and_a_cancelled_request_ends(
    client: InProcessClient, embedder: Path, ask: Ask
) -> None:
    greedy = Sampling(temperature=0)
    chat = GenerateRequest(model=str(embedder), prompt="fox", max_tokens=200, sampling=greedy)
    stream = client.submit(chat)
    many = client.submit(
        EmbedRequest(model=str(embedder), input=["The quick brown fox " * 40] * 500)
    )
    assert many.accepted.prompt_tokens > 50_000
    assert isinstance(many.get(LIMIT)[0], Embedded)
    many.close()
    events = many.get(LIMIT)
    while events and not isinstance(events[-1], Done | Failed):
        events = many.get(LIMIT)
    told: list[Event] = []
    while found := stream.get(LIMIT):
        told += found
    assert isinstance(told[-1], Done)
    assert told[-1].usage.completion_tokens == 200
    assert client.health().running == 0
    assert len(ask(embedder, "fox")[0]) == 1


def test_a_cancelled_request_ends_during_the_preparation_of_texts(
    service: ChatService, embedder: Path, monkeypatch: Any
) -> None:
    from mlx_provider.families.tokenizer.hf_tokenizer import HFTokenizer
    from mlx_provider.protocol.event_queue import EventQueue

    encode = HFTokenizer.encode_plain
    count = 0

    def leaving(*args: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            service.cancel("leaves")
        return encode(*args, **more)

    monkeypatch.setattr(HFTokenizer, "encode_plain", leaving)
    request = EmbedRequest(id="leaves", model=str(embedder), input=["fox"] * 100)
    with pytest.raises(RequestFailed, match="cancelled"):
        service.submit(request, EventQueue())
    assert count == 3
