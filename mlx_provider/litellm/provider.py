"""The handler that LiteLLM calls for `mlx/<model>`. Every entry point is a plain function, which
LiteLLM calls in an executor thread, and returns after the engine has accepted the request:
rendering and loading do not block the event loop, and errors come before a stream starts, so that
retries and fallbacks apply."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from litellm import CustomLLM
from litellm.exceptions import ContextWindowExceededError
from litellm.types.utils import EmbeddingResponse, ModelResponse

from ..client.connection import connect
from ..client.generation import EngineClient
from ..client.multi_prompt import submit_all
from .call import Call
from .embeddings import Vectors
from .errors import LiteLLMErrors
from .heartbeat import heartbeat
from .lazy_coroutine import LazyCoroutine
from .logged import ending_keeper, keep_warnings
from .model_info import model_facts, show
from .routes import reads_errors_in_streams
from .streams import AsyncReplyStream, Held, RefusedStream, Reply, ReplyStream
from .translate import answer_form, client_names, embeddings, generate_requests
from .unserved import unserved

Connect = Callable[[str | None, str | None], EngineClient]
"""(api_base, api_key) -> the engine there; without `api_base` this machine's own."""


class Provider(CustomLLM):
    def __init__(self, connect: Connect = connect) -> None:
        super().__init__()
        self._connect = connect

    def completion(self, *args: Any, **given: Any) -> ModelResponse:
        return self._submit(given).collect(given["model_response"])

    def acompletion(self, *args: Any, **given: Any) -> Coroutine[Any, Any, ModelResponse]:
        return LazyCoroutine(partial(self._submit(given).acollect, given["model_response"]))

    def streaming(self, *args: Any, **given: Any) -> ReplyStream:
        return ReplyStream(self._submit(given))

    def astreaming(self, *args: Any, **given: Any) -> AsyncReplyStream | RefusedStream:
        try:
            return AsyncReplyStream(self._submit(given), heartbeat(given["litellm_params"]))
        except ContextWindowExceededError as error:
            if not reads_errors_in_streams(given["litellm_params"]):
                raise
            return RefusedStream(error)

    def embedding(self, *args: Any, **given: Any) -> EmbeddingResponse:
        return self._embed(given).collect(given["model_response"])

    def aembedding(self, *args: Any, **given: Any) -> Coroutine[Any, Any, EmbeddingResponse]:
        return LazyCoroutine(partial(self._embed(given).acollect, given["model_response"]))

    image_generation = aimage_generation = unserved("image_generation")
    image_edit = aimage_edit = unserved("image_edit")

    def _submit(self, given: dict[str, Any]) -> Reply:
        """Raises LiteLLM's exceptions."""
        with LiteLLMErrors(given["model"]):
            call = _begun(given, "messages")
            names = client_names(call)
            with names.naming():
                requests = generate_requests(call)
                generation = submit_all(self._connect(call.api_base, call.api_key).submit, requests)
            keep_warnings(call.logging, [*map(names.text, generation.accepted.warnings)])
            show(call.model, model_facts(generation.accepted), call.deployment)
            form = answer_form(call)
            clipped = generation.accepted.max_tokens < (requests[0].max_tokens or 0)
            keep = ending_keeper(call.logging, clipped=clipped)
            return Reply(generation, call.deadline, call.model, form, names, keep)

    def _embed(self, given: dict[str, Any]) -> Held:
        """Raises LiteLLM's exceptions."""
        with LiteLLMErrors(given["model"]):
            call = _begun(given, "input")
            request, form = embeddings(call, given["input"])
            generation = self._connect(call.api_base, call.api_key).submit(request)
            keep_warnings(call.logging, generation.accepted.warnings)
            show(call.model, model_facts(generation.accepted), call.deployment, mode="embedding")
            vectors = Vectors(generation.accepted, form)
            return Held(generation, call.deadline, call.model, vectors)


def _begun(given: dict[str, Any], asked: str) -> Call:
    """Reports the start: without it, least-busy routing sends all requests to the first node."""
    call = Call.read(given)
    call.logging.pre_call(
        input=given[asked],
        api_key="",
        additional_args={"complete_input_dict": {}, "api_base": call.api_base},
    )
    return call
