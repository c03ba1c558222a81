"""The HTTP application over a `ChatService`: its routes, and the small ones themselves."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from ..errors import MLXProviderError, ModelNotFound
from ..protocol.health import Health
from ..protocol.requests import EmbedRequest, GenerateRequest, ModelRequest
from ..serving.hub import on_this_machine
from ..settings import EngineSettings
from ..wire import AGENTS, GENERATE
from ..wire.api import Fields
from ..wire.openai.answer import error_body
from .access import (
    Gate,
    Key,
    OperatorOnly,
    error_response,
    host_names,
    key_name,
    local_sender_fields,
    remote_sender_fields,
)
from .agent_listener import HEARTBEAT, ListenerRequest, ListenerRoute, until_stopped
from .generate import Count, Generate
from .handover import Activity, Handover
from .incoming import NDJSON, Bodies, Incoming, Parse, api_parser, engine_parser

if TYPE_CHECKING:
    from ..serving.service import ChatService

KINDS: tuple[type[ModelRequest], ...] = (GenerateRequest, EmbedRequest)
COUNTS: Mapping[str, Fields] = {
    "/v1/messages/count_tokens": {},
    "/v1/responses/input_tokens": {"object": "response.input_tokens"},
}
"""Routes that count tokens, and what their answers have beside `input_tokens`."""
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class EngineApp:
    """`asgi` is the application. `keys`, `hosts`: for an engine on TCP, see `access.Gate`; without
    keys it listens on its owner's socket, and `identity` says what it was started with. `blas`: the
    library that computes on a CPU. `body_bytes`: limit of all bodies that are read or prepared."""

    def __init__(
        self,
        service: ChatService,
        *,
        blas: str = "",
        keys: Sequence[Key] = (),
        hosts: Iterable[str] = (),
        body_bytes: int = EngineSettings().body_bytes,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        self._service = service
        self._bodies = Bodies(body_bytes)
        self._blas = blas
        self.activity = Activity()
        self.handover = Handover(self.activity)  # decides when the engine ends
        self._identity = dict(identity or {})
        self._started = int(time.time())
        self.stopping = anyio.Event()
        """Set at the end of the process: clients are disconnected, requests are refused."""
        self.listener = ListenerRoute(self._agents_app, self.stopping)
        self.asgi = Starlette(
            routes=self._routes(remote=bool(keys)),
            middleware=[Middleware(Gate, keys=keys, hosts=hosts)] if keys else [],
            exception_handlers={MLXProviderError: _typed_response, Exception: _unforeseen},
        )

    def _routes(self, *, remote: bool) -> list[Route]:
        incoming = self._incoming(remote_sender_fields if remote else local_sender_fields)
        operator_only = [Middleware(OperatorOnly)]
        owners = [_post("/v1/stop", self.handover.end), _post("/v1/listener", self.listener.open)]
        count = partial(self._count, "prompt_tokens", {})
        return [
            *([] if remote else owners),
            *(_post(kind.path, self._answer(incoming, engine_parser(kind))) for kind in KINDS),
            *self._api_routes(incoming, GENERATE),
            _post("/v1/count", Count(incoming, engine_parser(GenerateRequest), count)),
            _post("/tokenize", Count(incoming, api_parser("/tokenize"), self._tokenize)),
            _post("/detokenize", Count(incoming, api_parser("/detokenize"), self._detokenize)),
            Route("/v1/attach", self._attach),
            Route("/health", self._health),
            Route("/v1/stats", self._stats, middleware=operator_only),
            Route("/metrics", self._metrics, middleware=operator_only),
            Route("/cache", self._cache, middleware=operator_only),
            Route("/cache", self._clear, methods=["DELETE"], middleware=operator_only),
        ]

    def _incoming(self, sender_fields: Callable[[Scope, str | None], dict[str, Any]]) -> Incoming:
        return Incoming(self.activity, self._bodies, sender_fields, self.handover.admit)

    def _answer(self, incoming: Incoming, parse: Parse) -> Generate:
        return Generate(self._service, incoming, self.stopping, parse)

    def _api_routes(self, incoming: Incoming, paths: Iterable[str]) -> list[Route]:
        routes = [_post(path, self._answer(incoming, api_parser(path))) for path in paths]
        for path, fields in COUNTS.items():
            count = partial(self._count, "input_tokens", fields)
            routes.append(_post(path, Count(incoming, api_parser(path), count)))
        models = Route("/v1/models", self._models), Route("/v1/models/{model:path}", self._model)
        return [*routes, *models]

    def _agents_app(self, body: ListenerRequest) -> ASGIApp:
        """For the agent, every model name means the listener's model."""
        fields = {"model": body.model, "options": body.options, "max_tokens": body.max_tokens}
        incoming = self._incoming(lambda *_: dict(fields))
        keys = (Key(body.key, f"agent {token_hex(4)}"),)
        return Starlette(
            routes=self._api_routes(incoming, AGENTS),
            middleware=[Middleware(Gate, keys=keys, hosts=host_names("localhost"))],
            exception_handlers={MLXProviderError: _typed_response, Exception: _unforeseen},
        )

    def stop(self) -> None:
        """Accept nothing new, disconnect attached clients, end bodies that wait for memory."""
        self.stopping.set()
        self._bodies.close()

    def state(self) -> Health:
        """The state that `/health` shows to the engine's owner."""
        blas = {"blas": self._blas} if self._blas else {}
        return self._service.health().model_copy(update={"identity": self._identity, **blas})

    def _state_for(self, scope: Scope) -> Health:
        """A client with a named key does not see the load by others."""
        hidden = {"queued": 0, "running": 0, "active_memory": 0} if key_name(scope) else {}
        return self.state().model_copy(update=hidden)

    async def _attach(self, request: Request) -> Response:
        """Keeps the engine running while the client reads: its state, then empty lines."""
        return StreamingResponse(self._attachment_lines(request.scope), media_type=NDJSON)

    async def _attachment_lines(self, scope: Scope) -> AsyncIterator[bytes]:
        with self.activity.attach():
            yield self._state_for(scope).model_dump_json().encode() + b"\n"
            async for _ in until_stopped(self.stopping, HEARTBEAT):
                yield b"\n"

    async def _health(self, request: Request) -> Response:
        health = self._state_for(request.scope)
        return JSONResponse(health.model_dump(), status_code=200 if health.ok else 503)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._loaded_models()})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        found = next((model for model in self._loaded_models() if model["id"] == name), None)
        if found is None and await anyio.to_thread.run_sync(on_this_machine, name):
            found = {"id": name, "object": "model", "created": self._started, "owned_by": ""}
        if found is not None:
            return JSONResponse(found)
        error = ModelNotFound(f"{name!r} is not loaded: a request to it loads it", param="model")
        return JSONResponse(error_body(error), status_code=error.status)

    def _loaded_models(self) -> list[dict[str, Any]]:
        fixed = {"object": "model", "created": self._started}
        return [
            {"id": model.model, **fixed, "owned_by": model.plugin, **model.model_dump()}
            for model in self.state().models
        ]

    def _count(self, name: str, fields: Fields, request: GenerateRequest) -> dict[str, Any]:
        return {**fields, name: self._service.count(request)}

    def _tokenize(self, request: GenerateRequest) -> dict[str, Any]:
        found = self._service.tokenize(request)
        tokens, longest = list(found.tokens), found.context_length
        return {"count": len(tokens), "max_model_len": longest, "tokens": tokens}

    def _detokenize(self, request: GenerateRequest) -> dict[str, Any]:
        return {"prompt": self._service.tokenize(request).text}

    def _stats(self, request: Request) -> Response:
        """Runs in a thread of Starlette, as the endpoints below do: the service may block."""
        return JSONResponse(self._service.stats().model_dump())

    def _metrics(self, request: Request) -> Response:
        return Response(self._service.metrics(), headers={"content-type": PROMETHEUS})

    def _cache(self, request: Request) -> Response:
        return JSONResponse(self._service.prefixes.report())

    def _clear(self, request: Request) -> Response:
        self._service.prefixes.clear()
        return JSONResponse({"cleared": True})


def _post(path: str, endpoint: Any) -> Route:
    return Route(path, endpoint, methods=["POST"])


async def _typed_response(request: Request, error: Any) -> Response:
    return error_response(error, path=request.url.path)


async def _unforeseen(request: Request, error: Exception) -> Response:
    # The traceback goes to the log, never to a client: the server raises the error again.
    hidden = MLXProviderError("internal error of the engine: see `mlx-provider engine logs`")
    return error_response(hidden, {"connection": "close"}, request.url.path)
