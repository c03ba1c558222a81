"""The handler that LiteLLM calls for `mlx/<model>`. Every entry point is a plain function: LiteLLM
calls `a...` in an executor thread, and it returns once the engine has accepted the request, as
`streaming` does. So errors come before a stream starts, and retries and fallbacks apply."""

from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from functools import cached_property, partial
from typing import Any, TypeVar

from litellm import CustomLLM
from litellm.exceptions import ContextWindowExceededError
from litellm.types.utils import EmbeddingResponse, ModelResponse

from ..client.connection import connect
from ..client.generation import submit_all
from ..client.http import HttpClient
from .call import (
    Call,
    embeddings,
    ending_keeper,
    generate_requests,
    keep_warnings,
    reads_errors_in_streams,
)
from .errors import LiteLLMErrors, make_refusal
from .model_info import add_to_map, set_context_limit
from .streams import SILENCE, OpenRequest, ResponseStream, refuse

T = TypeVar("T")


class LazyCoroutine(Coroutine[Any, Any, T]):
    """`begin` makes the coroutine at the first await. LiteLLM gets it in an executor thread and
    awaits it in its event loop (1.106.2, `main.acompletion`). If the client disconnects in between,
    a coroutine made before would cause a warning and keep the engine's request alive."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._begin = begin

    @cached_property
    def _coroutine(self) -> Coroutine[Any, Any, T]:
        return self._begin()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()


Connect = Callable[[str | None, str | None], HttpClient]
"""(api_base, api_key) -> client of the engine there; without `api_base`, of the local one."""


class Provider(CustomLLM):
    """LiteLLM's interface of a provider. Its methods raise LiteLLM's exceptions."""

    def __init__(self, connect: Connect = connect) -> None:
        super().__init__()
        self._connect = connect

    def completion(self, *args: Any, **kwargs: Any) -> ModelResponse:
        return self._submit(kwargs).collect(kwargs["model_response"])

    def acompletion(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, ModelResponse]:
        return LazyCoroutine(partial(self._submit(kwargs).acollect, kwargs["model_response"]))

    def streaming(self, *args: Any, **kwargs: Any) -> ResponseStream:
        return ResponseStream(self._submit(kwargs))

    def astreaming(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        try:
            heartbeat = SILENCE if kwargs["litellm_params"].get("proxy_server_request") else None
            return ResponseStream(self._submit(kwargs), heartbeat)
        except ContextWindowExceededError as error:
            if not reads_errors_in_streams(kwargs["litellm_params"]):
                raise
            return refuse(error)  # a stream that only raises it: on /v1/responses, for Codex

    def embedding(self, *args: Any, **kwargs: Any) -> EmbeddingResponse:
        return self._embed(kwargs).collect(kwargs["model_response"])

    def aembedding(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, EmbeddingResponse]:
        return LazyCoroutine(partial(self._embed(kwargs).acollect, kwargs["model_response"]))

    image_generation = aimage_generation = make_refusal("image_generation")
    image_edit = aimage_edit = make_refusal("image_edit")

    def _submit(self, kwargs: dict[str, Any]) -> OpenRequest:
        with LiteLLMErrors(kwargs["model"]):
            call = _begin_call(kwargs, "messages")
            names = call.names
            with names.naming():
                requests = generate_requests(call)
                generation = submit_all(self._connect(call.api_base, call.api_key).submit, requests)
            keep_warnings(call.logging, [*map(names.text, generation.accepted.warnings)])
            add_to_map(call.model, generation.accepted)
            set_context_limit(call.litellm_params, generation.accepted.context_length)
            clipped = generation.accepted.max_tokens < (requests[0].max_tokens or 0)
            keep = ending_keeper(call.logging, clipped=clipped)
            return OpenRequest(generation, call.deadline, call.model, names, keep, text=call.text)

    def _embed(self, kwargs: dict[str, Any]) -> OpenRequest:
        with LiteLLMErrors(kwargs["model"]):
            call = _begin_call(kwargs, "input")
            request, encoding = embeddings(call, kwargs["input"])
            generation = self._connect(call.api_base, call.api_key).submit(request)
            keep_warnings(call.logging, generation.accepted.warnings)
            add_to_map(call.model, generation.accepted, mode="embedding")
            set_context_limit(call.litellm_params, generation.accepted.context_length)
            return OpenRequest(generation, call.deadline, call.model, encoding=encoding)


def _begin_call(kwargs: dict[str, Any], content: str) -> Call:
    """Read the arguments, and report the start: least-busy routing counts the reports."""
    call = Call(kwargs)
    call.logging.pre_call(
        input=kwargs[content],
        api_key="",
        additional_args={"complete_input_dict": {}, "api_base": call.api_base},
    )
    return call
