"""The routes: from a body to a request."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ...errors import BadRequest
from ..asked import Asked, Read
from ..openai.parameters import Parameters
from ..results import Results
from .reply import reranked, scored
from .request import score_request, texts, top_n

PAIRS = (("text_1", "text_2"), ("queries", "documents"))
"""Names of queries and documents of a score."""


def _rerank(body: dict[str, Any], sender: Mapping[str, Any]) -> Asked:
    model, query, given = (body.pop(name, None) for name in ("model", "query", "documents"))
    if not isinstance(query, str):
        raise BadRequest("query must be a text", param="query")
    documents = texts(given, "documents")
    params = Parameters(body)
    wanted, shown = top_n(params), params.flag("return_documents")
    request = score_request(params, {**sender, "model": model}, [query], documents)
    body_of = partial(reranked, wanted=wanted, documents=documents if shown else None)
    return Asked([request], partial(Results, body=body_of))


def _score(body: dict[str, Any], sender: Mapping[str, Any]) -> Asked:
    model = body.pop("model", None)
    names = next((each for each in PAIRS if each[0] in body), PAIRS[0])
    queries, documents = (texts(body.pop(name, None), name) for name in names)
    request = score_request(Parameters(body), {**sender, "model": model}, queries, documents)
    return Asked([request], partial(Results, body=scored))


ROUTES: Mapping[str, Read] = {"/v1/rerank": _rerank, "/v1/score": _score}
