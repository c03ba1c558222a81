"""From a request to its events: normalise, render, tokenise, queue; and back to text."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from os import getpid
from typing import Any

import mlx.core as mx

from ..config import EngineSettings
from ..engine.ledger import Post
from ..engine.request import Request, SamplingParams
from ..engine.worker import EngineWorker
from ..errors import EngineDied, MLXProviderError, RequestFailed
from ..isolation import Isolation, error_of_request
from ..mailbox import Mailbox
from ..metrics import EngineMetrics
from ..protocol import (
    Accepted,
    Done,
    ErrorBody,
    Failed,
    GenerateRequest,
    Health,
    Sampling,
    WarmPrompt,
)
from ..records import ModelInfo, Prompt
from ..registry import PluginRegistry
from ..upstream import blas
from .grants import Grants, namespace, read_grants
from .interface import Deliver, deliver_now
from .media_room import MediaClaim, MediaRoom
from .models import Models, Served
from .prompt import prepare, prompt_text
from .rows import make_row
from .structure import Form, form_of
from .validate import checked, room_for

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Live:
    request: Request
    served: Served


class ChatService:
    """Serves requests on one engine thread; see `interface.Service`."""

    def __init__(
        self,
        settings: EngineSettings,
        deliver: Deliver = deliver_now,
        registry: PluginRegistry | None = None,
    ) -> None:
        file = settings.models_file
        self._grants = Grants(settings.model_roots, read_grants(file) if file else None)
        self._recorder = EngineMetrics()
        self._deliver = deliver
        self._worker = EngineWorker(self._take, self._died)
        self._media = MediaRoom(settings.media_bytes, settings.max_queue)
        self._models = Models(
            settings,
            registry or PluginRegistry.discover(),
            self._worker,
            self._recorder,
            beside=lambda: self._media.held,
        )
        self._claims: dict[int, MediaClaim] = {}
        """What requests with images hold, by mailbox."""
        self._live: dict[str, _Live] = {}
        self._by_mailbox: dict[int, str] = {}
        self._lock = threading.Lock()

    # -- Service

    def submit(self, request: GenerateRequest, mailbox: Mailbox) -> Accepted:
        claim = self._media.claim(request.id)
        with Isolation() as trying:
            return self._accepted(request, mailbox, claim)
        claim.close()
        raise _refused(request, trying.error)

    def _accepted(self, request: GenerateRequest, mailbox: Mailbox, claim: MediaClaim) -> Accepted:
        arrived = time.monotonic()
        request = self._grants.admitted(request)
        served = self._models.get(request.model, request.options)
        if request.options.warm and not served.warmed:
            served.warmed = True
            self._warm(request)
        prepared = prepare(served, request, claim)
        checked(request, prepared.prompt, served.model.info)
        form = form_of(served, request, prepared.prompt.text)
        live = self._request(request, prepared.prompt, form, served, mailbox, arrived)
        self._enter(live, served, claim)
        return Accepted(
            id=request.id,
            model=request.model,
            prompt_tokens=len(prepared.prompt.tokens),
            max_tokens=live.max_tokens,
            context_length=served.model.info.context_length,
            echo=prompt_text(served, prepared.prompt) if request.echo else "",
            warnings=[
                *prepared.warnings,
                *form.warnings,
                *(f"{name} has no effect" for name in request.ignored),
            ],
        )

    def cancel(self, request_id: str) -> None:
        self._media.refuse(RequestFailed("the request was cancelled"), request_id)
        with self._lock:
            live = self._live.get(request_id)
        if live is not None and self._worker.alive:
            self._call(partial(live.served.engine.cancel, live.request))

    def health(self) -> Health:
        served = self._models.all()
        self._record_state()
        return Health(
            ok=self._worker.alive,
            version=version("mlx-provider"),
            pid=getpid(),
            device=device_name(),
            blas=blas.active(),
            models=[s.status for s in served],
            queued=self._queued(),
            running=self._running(),
            active_memory=mx.get_active_memory(),
            detail="" if self._worker.alive else "the engine thread does not run",
        )

    def metrics(self) -> bytes:
        self._record_state()
        return self._recorder.exposition()

    def cache_report(self) -> dict[str, Any]:
        return self._models.store_report()

    def cache_clear(self) -> None:
        self._models.store_clear()

    def close(self) -> None:
        error = EngineDied("the engine is shutting down")
        with self._lock:
            lives = list(self._live.values())
        for live in lives:
            if self._worker.alive:
                self._call(partial(live.served.engine.fail, live.request, error))
        self._models.close()
        self._worker.close()
        self._died(error)

    def _warm(self, first: GenerateRequest) -> None:
        """Queue the operator's warm prompts, so that their prefixes are in the store."""
        for request in warm_requests(first):
            try:
                self.submit(request, Mailbox())
            except MLXProviderError as error:
                log.warning("a warm prompt of %s is left out: %s", first.model, error.message)

    # -- one request

    def _request(
        self,
        wire: GenerateRequest,
        prompt: Prompt,
        form: Form,
        served: Served,
        mailbox: Mailbox,
        arrived: float,
    ) -> Request:
        info = served.model.info
        request = Request(
            id=wire.id,
            prompt=prompt,
            params=sampling(wire, info),
            max_tokens=room_for(wire, prompt, info),
            mailbox=mailbox,
            min_tokens=wire.min_tokens,
            stop_tokens=info.stop_tokens | frozenset(wire.stop_token_ids),
            logprobs=wire.top_logprobs if wire.logprobs else None,
            salt=namespace(wire),
            session=wire.session,
            deadline=arrived + wire.timeout if wire.timeout else None,
            arrived=arrived,
        )
        request.rows = [make_row(request, i, wire, form, served) for i in range(wire.n)]
        return request

    def _enter(self, request: Request, served: Served, claim: MediaClaim) -> None:
        """Let a request in, or refuse it; never waits for the engine thread."""
        with self._lock:
            served.engine.scheduler.check(request, served.arriving)
            served.arriving += 1
            self._live[request.id] = _Live(request, served)
            self._by_mailbox[id(request.mailbox)] = request.id
            if claim.used:
                self._claims[id(request.mailbox)] = claim
        self._call(partial(self._arrive, request, served))

    def _arrive(self, request: Request, served: Served) -> None:
        with self._lock:
            served.arriving -= 1
        served.engine.submit(request)

    # -- from the engine thread

    def _take(self, posts: list[Post]) -> None:
        self._deliver(posts)
        if self._claims:
            self._free_media(posts)
        ended = [mailbox for mailbox, events in posts if isinstance(events[-1], Done | Failed)]
        self._let_go([mailbox for mailbox, _ in posts if mailbox.ended and mailbox not in ended])
        if ended:
            with self._lock:
                for mailbox in ended:
                    name = self._by_mailbox.pop(id(mailbox), None)
                    self._live.pop(name or "", None)

    def _let_go(self, closed: list[Mailbox]) -> None:
        """Cancel what would be written into mailboxes that take nothing more."""
        for mailbox in closed:
            with self._lock:
                live = self._live.get(self._by_mailbox.get(id(mailbox), ""))
            if live is not None:
                live.served.engine.cancel(live.request)

    def _free_media(self, posts: list[Post]) -> None:
        """A request's first event is the end of its prefill."""
        for mailbox, events in posts:
            claim = self._claims.get(id(mailbox))
            if claim is not None:
                claim.prefilled()
                if isinstance(events[-1], Done | Failed):
                    del self._claims[id(mailbox)]
                    claim.close()

    def _died(self, error: EngineDied) -> None:
        """The engine thread is gone: everyone who waits is told, models are loaded anew."""
        with self._lock:
            lives, self._live, self._by_mailbox = list(self._live.values()), {}, {}
            claims, self._claims = list(self._claims.values()), {}
        for claim in claims:
            claim.close()
        self._media.refuse(error)
        self._models.forget()
        failed = Failed(error=ErrorBody.of(error))
        for live in lives:
            self._recorder.request_failed(error.code)
            self._deliver([(live.request.mailbox, [failed])])

    # -- state

    def _call(self, function: Callable[[], None]) -> None:
        self._worker.call(function).add_done_callback(_log_failure)

    def _queued(self) -> int:
        return sum(s.engine.scheduler.queued + s.arriving for s in self._models.all())

    def _running(self) -> int:
        return sum(s.engine.scheduler.active_rows for s in self._models.all())

    def _record_state(self) -> None:
        self._recorder.set_state(
            queued=self._queued(),
            running=self._running(),
            active_memory=mx.get_active_memory(),
            store_bytes=self._models.store_bytes(),
        )


def _refused(request: GenerateRequest, error: BaseException | None) -> MLXProviderError:
    """The error that the client gets, also for what a template, parser or grammar raised."""
    told = error_of_request("its preparation", error or MLXProviderError("no error"))
    unforeseen = None if error is told else error
    level = logging.INFO if unforeseen is None else logging.ERROR
    log.log(
        level, "request %s of %.200s refused: %s %s: %.2000s",
        request.id, request.model, told.status, told.code, told.message, exc_info=unforeseen,
    )  # fmt: skip
    return told


def warm_requests(first: GenerateRequest) -> list[GenerateRequest]:
    """One-token requests for the warm prompts in the options of `first`."""
    options = first.options.model_copy(update={"warm": []})
    prompts = [
        WarmPrompt(messages=[{"role": "system", "content": each}])
        if isinstance(each, str)
        else each
        for each in first.options.warm
    ]
    return [
        GenerateRequest(
            model=first.model,
            messages=_with_user(prompt.messages),
            tools=prompt.tools,
            max_tokens=1,
            sampling=Sampling(temperature=0),
            template=first.template,
            origin=first.origin,
            tenant=first.tenant,
            options=options,
        )
        for prompt in prompts
    ]


def _with_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A template may refuse a conversation without a user message."""
    if messages and messages[-1].get("role") == "system":
        return [*messages, {"role": "user", "content": "."}]
    return messages


def sampling(wire: GenerateRequest, info: ModelInfo) -> SamplingParams:
    """The request's sampling values, else the model's, else neutral ones."""
    asked, default = wire.sampling, info.sampling

    def first(*values: float | None) -> float:
        return next(v for v in values if v is not None)

    return SamplingParams(
        temperature=first(asked.temperature, default.temperature, 1.0),
        top_p=first(asked.top_p, default.top_p, 1.0),
        top_k=max(0, int(first(asked.top_k, default.top_k, 0))),
        min_p=first(asked.min_p, default.min_p, 0.0),
        repetition_penalty=first(asked.repetition_penalty, default.repetition_penalty, 1.0),
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=tuple(asked.logit_bias.items()),
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
    )


def device_name() -> str:
    """The device that MLX runs on."""
    info = mx.device_info()
    return str(info.get("device_name") or mx.default_device())


def _log_failure(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, MLXProviderError):
        log.error("a call to the engine thread failed", exc_info=error)
