"""`/v1/rerank` and `/v1/score` of an engine; LiteLLM's client of vLLM's servers is the judge."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import litellm
import pytest
from litellm.llms.custom_httpx.http_handler import HTTPHandler

from mlx_provider.bounds import MAX_DOCUMENTS

DOCUMENTS = ["The circle is red.", "Hello there, how are you?", "The square is blue."]
QUERY = "which colour is the circle?"


def posted(engine: Any, path: str, **body: Any) -> Any:
    return engine.http.post(path, json={"model": engine.reranker, **body})


def test_litellm_reads_the_best_documents(engine: Any) -> None:
    score = posted(engine, "/v1/score", text_1=QUERY, text_2=DOCUMENTS).raise_for_status().json()
    assert [each["index"] for each in score["data"]] == [0, 1, 2]
    scores = [each["score"] for each in score["data"]]
    order = sorted(range(3), key=lambda at: -scores[at])
    for wanted in (None, 2):
        with closing(HTTPHandler()) as handler:
            reply = litellm.rerank(
                model=f"hosted_vllm/{engine.reranker}",
                query=QUERY,
                documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]],
                top_n=wanted,
                api_base=f"{engine.url}/v1",
                api_key="the-key",
                client=handler,
            )
        assert isinstance(reply, litellm.RerankResponse)
        results: Any = reply.results
        assert [each["index"] for each in results] == order[:wanted]
        assert [e["relevance_score"] for e in results] == [scores[at] for at in order[:wanted]]
        assert [e["document"]["text"] for e in results] == [DOCUMENTS[at] for at in order[:wanted]]
        assert reply.meta is not None
        assert reply.meta["billed_units"] == {"total_tokens": score["usage"]["total_tokens"]}
    bare = posted(engine, "/v1/rerank", query=QUERY, documents=DOCUMENTS).json()
    assert [*bare["results"][0]] == ["index", "relevance_score"]
    assert bare["usage"]["prompt_tokens"] == bare["usage"]["total_tokens"] > 0


def test_pairs_of_a_score(engine: Any) -> None:
    """One query for all documents, or one for each, under either pair of names."""
    pairs = [QUERY, "hello?"], DOCUMENTS[:2]
    whole = posted(engine, "/v1/score", queries=pairs[0], documents=pairs[1]).json()["data"]
    same = posted(engine, "/v1/score", text_1=pairs[0], text_2=pairs[1]).json()["data"]
    assert whole == same
    for at in range(2):
        one = posted(engine, "/v1/score", text_1=pairs[0][at], text_2=pairs[1][at]).json()["data"]
        assert one[0]["score"] == pytest.approx(whole[at]["score"], abs=1e-5)


def test_what_is_refused_is_named(engine: Any) -> None:
    rerank = {"query": QUERY, "documents": DOCUMENTS}
    score = {"text_1": QUERY, "text_2": DOCUMENTS}
    for path, body, status, param, words in (
        ("rerank", {"query": ["a"]}, 400, "query", "must be a text"),
        ("rerank", {"documents": []}, 400, "documents", "a list of texts"),
        ("rerank", {"documents": ["a", {"image": "b"}]}, 400, "documents[1]", "a text"),
        ("rerank", {"documents": ["a"] * (MAX_DOCUMENTS + 1)}, 400, "documents", "at most 1000"),
        ("rerank", {"documents": ["a", "b " * 40_000]}, 400, "documents[1]", "too long"),
        ("rerank", {"top_n": 0}, 400, "top_n", "above 0"),
        ("rerank", {"rank_fields": ["a"]}, 400, "rank_fields", "unknown parameter"),
        ("rerank", {"model": engine.vectors}, 400, "model", "is no reranker"),
        ("rerank", {"model": "nobody"}, 404, "model", "no model"),
        ("score", {"text_2": None}, 400, "text_2", "a list of texts"),
        ("score", {"text_1": ["a"] * 2}, 400, "queries", "2 queries for 3 documents"),
    ):
        given = rerank if path == "rerank" else score
        reply = posted(engine, f"/v1/{path}", **{**given, **body})
        error = json.loads(reply.text)["error"]
        assert (reply.status_code, error["param"]) == (status, param)
        assert words in error["message"]
