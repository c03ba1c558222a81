"""`/v1/embeddings` through the proxy, as OpenAI's client asks for it."""

import httpx
import numpy as np
from tokenizers import Tokenizer

from .conftest import refused

TEXTS = ["Hello there", "The quick brown fox asks the lazy dog. " * 40, "fox"]


def ask(client, texts, **more):
    return client.embeddings.create(model="embedder", input=texts, **more)


def test_embeddings_of_texts_and_of_their_tokens_are_equal(client, own_engine, embedding_model):
    found = ask(client, TEXTS)
    assert [each.index for each in found.data] == [0, 1, 2]
    assert found.usage.prompt_tokens == found.usage.total_tokens > 3
    for text, each in zip(TEXTS, found.data, strict=True):
        assert ask(client, text).data[0].embedding == each.embedding
        assert abs(np.linalg.norm(each.embedding) - 1) < 1e-6
        assert ask(client, text, encoding_format="float").data[0].embedding == each.embedding
    (cut,) = ask(client, TEXTS[0], dimensions=8, user="someone").data
    whole = np.array(found.data[0].embedding)[:8]
    np.testing.assert_allclose(cut.embedding, whole / np.linalg.norm(whole), rtol=1e-6)
    asked = {"prompt_name": "query"}
    assert ask(client, "fox", extra_body=asked).data[0].embedding != found.data[2].embedding
    tokenizer = Tokenizer.from_file(str(embedding_model / "tokenizer.json"))
    tokens = [tokenizer.encode(text).ids for text in TEXTS]
    assert [each.embedding for each in ask(client, tokens).data] == [
        each.embedding for each in found.data
    ], "token ids are the model's, not those of a tokenizer of LiteLLM's"
    assert ask(client, tokens[0]).data[0].embedding == found.data[0].embedding


def test_the_encoding_format_decides_between_list_and_base64(raw, own_engine):
    asked = {"model": "embedder", "input": "fox"}
    for form, kind in ((None, list), ("float", list), ("base64", str)):
        more = {} if form is None else {"encoding_format": form}
        reply = raw.post("/v1/embeddings", json={**asked, **more}).raise_for_status().json()
        assert isinstance(reply["data"][0]["embedding"], kind)


def test_invalid_embedding_inputs_are_refused_with_their_index(raw, own_engine):
    asked = {"model": "embedder", "input": "fox"}
    for more, words in (
        ({"input": ""}, "input[0]: it is empty"),
        ({"input": []}, "must be a text"),
        ({"input": ["fox", ""]}, "input[1]: it is empty"),
        ({"input": ["fox"] * 10_000}, "at most 2048 entries are possible, got 10000"),
        ({"dimensions": 10**9}, "dimensions must be at most 64"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format must be float or base64"),
        ({"prompt_name": "nobody"}, "it has: document, query"),
        ({"truncate": "END"}, "unknown parameter: truncate"),
        ({"input": [[1, 2, 100_000]]}, "token id 100000 is not within"),
        ({"model": "demo"}, "let the operator choose model_info.mlx.pooling"),
    ):
        reply = raw.post("/v1/embeddings", json={**asked, **more})
        refused(reply, words)
    for text in ("The quick brown fox " * 20_000, "x" * 10_000_000):
        reply = raw.post("/v1/embeddings", json={**asked, "input": ["fox", text]})
        refused(reply, "ContextWindowExceededError")
        assert "input[1]" in reply.text


def test_a_disconnected_embedding_client_cancels_its_request(engine, leave):
    asked = {"model": "scripted", "input": "slow"}
    leave("/v1/embeddings", asked, lambda: engine.seen()["requests"])
    engine.wait_for(lambda seen: len(seen["cancelled"]) == 1)
    assert engine.request["model"] == "any"
    assert engine.request["salt"].startswith("key:")
    assert engine.request["options"]["kv_bits"] == 8
    assert engine.request["origin"] == "remote", "as the engine says of all that comes over TCP"
    body = {"model": "any", "input": ["x"], "options": {"dtype": "float32"}}
    assert (
        httpx.post(f"{engine.url}/v1/embed", json=body, trust_env=False, timeout=300).status_code
        == 401
    )
