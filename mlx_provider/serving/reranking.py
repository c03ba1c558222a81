"""Converts a client's documents to the engine's inputs: a prompt for each, scored by a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..engine.inputs import Scores
from ..errors import BadRequest
from ..families.tokenizer import common_length
from ..families.tokenizer.template_fit import fit_messages
from ..protocol.event_queue import EventQueue
from ..protocol.requests import ScoreRequest
from ..records import Reranking
from .embedding import bounded, prepared_inputs
from .model_view import ModelView
from .prepared import Prepared

OTHER = "\N{SOFT HYPHEN}"
"""A document that begins like no real one: what its prompt shares with another is not of it."""


def make_scores(
    wire: ScoreRequest,
    view: ModelView,
    queue: EventQueue,
    arrived: float,
    check_wanted: Callable[[], None],
) -> Prepared:
    """Render and tokenise (host work, any thread).

    `check_wanted` is called before each document; `arrived`: monotonic time. Raises `BadRequest`
    that names the document, `ContextTooLong`.
    """
    how = view.info.reranking
    if how is None:
        raise BadRequest(
            f"{view.name} is no reranker: name a model whose files, template or name say so",
            param="model",
        )
    within = [token for token in (how.yes, how.no) if token is not None]
    if not all(0 <= token < view.info.vocab_size for token in within):
        raise BadRequest(f"{view.name} names tokens that it does not have", param="model")
    if len(wire.queries) not in (1, len(wire.documents)):
        raise BadRequest(
            f"there are {len(wire.queries)} queries for {len(wire.documents)} documents: send "
            "one query, or one for each document",
            param="queries",
        )
    documents = wire.documents
    queries = wire.queries if len(wire.queries) > 1 else wire.queries * len(documents)

    def prompt(index: int, where: str) -> Sequence[int]:
        check_wanted()
        return _prompt(view, how, queries[index], documents[index], wire.instruction)

    limit, hint = view.info.context_length, " with its query"
    tokens = bounded("documents", len(documents), limit, prompt, hint)
    stranger = [_prompt(view, how, query, OTHER, wire.instruction) for query in wire.queries[:1]]
    shared = min(common_length(stranger[0], each) for each in tokens)
    return prepared_inputs(wire, view, queue, arrived, Scores(tokens, shared, how.yes, how.no))


def _prompt(
    view: ModelView, how: Reranking, query: str, document: str, instruction: str | None
) -> Sequence[int]:
    messages = fit_messages(how.messages(query, document, instruction), view.info.template)
    return view.model.prepare(messages, tools=[], media=[], variables=how.variables).tokens
