"""From a request to its events: normalise, render, tokenise, queue; and back to text."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from math import inf
from os import getpid
from typing import Any

import mlx.core as mx

from ..chat.media.room import MediaClaim, MediaRoom
from ..config import EngineSettings
from ..engine.request import Request, SamplingParams
from ..engine.step_output import Post
from ..engine.worker import EngineWorker
from ..errors import BadRequest, EngineDied, MLXProviderError, RequestFailed
from ..isolation import Fault, Isolation
from ..protocol.event_queue import Mailbox
from ..protocol.messages import (
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
from .grants import Grants, names_repository, namespace, read_grants
from .interface import Deliver, deliver_now
from .metrics import EngineMetrics
from .models import Models, Use
from .prompt import Prepared, prepare, prompt_text
from .rows import make_row
from .served import Running, Served
from .structure import Form, form_of
from .validate import checked, room_for

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Live:
    request: Request
    use: Use
    running: Running


@dataclass(frozen=True)
class _Ready:
    """A request that may be queued, and what its client is told."""

    request: Request
    prepared: Prepared
    form: Form


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
        self._ids: dict[str, Mailbox] = {}
        """Every request from its arrival to its end."""
        self._live: dict[str, _Live] = {}
        self._by_mailbox: dict[int, str] = {}
        self._lock = threading.Lock()

    # -- Service

    def submit(self, request: GenerateRequest, mailbox: Mailbox) -> Accepted:
        self._admit(request.id, mailbox)
        claim = self._media.claim(request.id)
        with Isolation() as trying:
            return self._accepted(request, mailbox, claim)
        claim.close()
        with self._lock:
            self._forget_id(request.id, mailbox)
        raise _refused(request, trying.fault)

    def _admit(self, name: str, mailbox: Mailbox) -> None:
        """An id is one request's: whoever cancels by it means that one."""
        with self._lock:
            if self._ids.setdefault(name, mailbox) is not mailbox:
                raise BadRequest("another request with this id is being served", param="id")

    def _forget_id(self, name: str, mailbox: Mailbox) -> None:
        """The caller holds the lock."""
        if self._ids.get(name) is mailbox:
            del self._ids[name]

    def _accepted(self, wire: GenerateRequest, mailbox: Mailbox, claim: MediaClaim) -> Accepted:
        arrived = time.monotonic()
        request = self._grants.admitted(wire)
        with ExitStack() as until_entered:
            use, ready = self._ready(request, mailbox, arrived, claim, until_entered)
            self._warm(wire, request.options.warm, use.served)
            self._enter(ready.request, use, claim)
            until_entered.pop_all()
        return Accepted(
            id=request.id,
            model=request.model,
            prompt_tokens=len(ready.prepared.prompt.tokens),
            max_tokens=ready.request.max_tokens,
            context_length=use.served.info.context_length,
            echo=prompt_text(use.served, ready.prepared.prompt) if request.echo else "",
            warnings=[
                *ready.prepared.warnings,
                *ready.form.warnings,
                *(f"{name} has no effect" for name in request.ignored),
            ],
        )

    def _ready(
        self,
        wire: GenerateRequest,
        mailbox: Mailbox,
        arrived: float,
        claim: MediaClaim,
        held: ExitStack,
    ) -> tuple[Use, _Ready]:
        """The request and its model, held in memory with room for the request's rows.

        What its rows need is known once the prompt is rendered, for which the model must be here.
        Where other models leave no such room, the request stands in line without holding any.
        """
        deadline = arrived + wire.timeout if wire.timeout else inf
        find = partial(
            self._models.use, wire.model, wire.options,
            who=wire.id, since=arrived, deadline=deadline, repository=names_repository(wire),
            may_lengthen=self._grants.may_lengthen(wire),
        )  # fmt: skip
        use = held.enter_context(find())
        ready = self._prepared(wire, mailbox, arrived, use, claim)
        while not use.covers(need := self._need(ready.request, use)):
            served = use.served
            use.end()
            use = held.enter_context(find(rows=need))
            if use.served is not served:
                ready = self._prepared(wire, mailbox, arrived, use, claim)
        return use, ready

    def _prepared(
        self, wire: GenerateRequest, mailbox: Mailbox, arrived: float, use: Use, claim: MediaClaim
    ) -> _Ready:
        served = use.served
        prepared = prepare(served, wire, claim)
        checked(wire, prepared.prompt, served.info)
        form = form_of(served, wire, prepared.prompt.text)
        request = self._request(wire, prepared.prompt, form, use, mailbox, arrived)
        return _Ready(request, prepared, form)

    def _need(self, request: Request, use: Use) -> int:
        """Bytes for its rows. Raises `BadRequest` for more than there can be, `Overloaded`."""
        running = use.served.running
        running.engine.scheduler.check(request, running.arriving)
        return running.engine.scheduler.reservation(request.rows)

    def cancel(self, request_id: str) -> None:
        self._media.refuse(RequestFailed("the request was cancelled"), request_id)
        with self._lock:
            live = self._live.get(request_id)
        if live is None:
            self._models.withdraw(request_id)
        elif self._worker.alive:
            self._call(partial(live.running.engine.cancel, live.request))

    def health(self) -> Health:
        self._record_state()
        return Health(
            ok=self._worker.alive,
            version=version("mlx-provider"),
            pid=getpid(),
            device=device_name(),
            blas=blas.active(),
            models=self._models.statuses(),
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
                self._call(partial(live.running.engine.fail, live.request, error))
        self._models.close()
        self._worker.close()
        self._died(error)

    def _warm(
        self, first: GenerateRequest, prompts: Sequence[str | WarmPrompt], served: Served
    ) -> None:
        """Queue the operator's warm prompts once for each who does not see another's prefixes."""
        with self._lock:
            if not prompts or not served.to_warm(namespace(first), prompts):
                return
        for request in warm_requests(first, prompts):
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
        use: Use,
        mailbox: Mailbox,
        arrived: float,
    ) -> Request:
        served, info = use.served, use.served.info
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

    def _enter(self, request: Request, use: Use, claim: MediaClaim) -> None:
        """Let a request in, or refuse it; never waits for the engine thread."""
        running = use.served.running
        with self._lock:
            running.engine.scheduler.check(request, running.arriving)
            running.arriving += 1
            self._live[request.id] = _Live(request, use, running)
            self._by_mailbox[id(request.mailbox)] = request.id
            if claim.used:
                self._claims[id(request.mailbox)] = claim
        try:
            self._call(partial(self._arrive, request, running))
        except MLXProviderError:
            self._left([request.mailbox])
            raise

    def _arrive(self, request: Request, running: Running) -> None:
        with self._lock:
            running.arriving -= 1
        if self._worker.steps(running.engine):
            running.engine.submit(request)
        else:
            error = EngineDied("the engine thread died before the request reached it")
            self._take([(request.mailbox, [Failed(error=ErrorBody.of(error))])])

    # -- from the engine thread

    def _take(self, posts: list[Post]) -> None:
        self._deliver(posts)
        if self._claims:
            self._free_media(posts)
        ended = [mailbox for mailbox, events in posts if isinstance(events[-1], Done | Failed)]
        self._let_go([mailbox for mailbox, _ in posts if mailbox.ended and mailbox not in ended])
        if ended:
            self._left(ended)

    def _left(self, mailboxes: list[Mailbox]) -> None:
        """Requests have ended: their models may leave, too."""
        with self._lock:
            names = [self._by_mailbox.pop(id(mailbox), "") for mailbox in mailboxes]
            lives = [self._live.pop(name, None) for name in names]
            for name, mailbox in zip(names, mailboxes, strict=True):
                self._forget_id(name, mailbox)
        for live in lives:
            if live is not None:
                live.use.end()

    def _let_go(self, closed: list[Mailbox]) -> None:
        """Cancel what would be written into mailboxes that take nothing more."""
        for mailbox in closed:
            with self._lock:
                live = self._live.get(self._by_mailbox.get(id(mailbox), ""))
            if live is not None:
                live.running.engine.cancel(live.request)

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
            for live in lives:
                self._forget_id(live.request.id, live.request.mailbox)
        for claim in claims:
            claim.close()
        self._media.refuse(error)
        self._models.forget()
        failed = Failed(error=ErrorBody.of(error))
        for live in lives:
            live.use.end()
            self._recorder.request_failed(error.code)
            self._deliver([(live.request.mailbox, [failed])])

    # -- state

    def _call(self, function: Callable[[], None]) -> None:
        self._worker.call(function).add_done_callback(_log_failure)

    def _queued(self) -> int:
        return sum(e.engine.scheduler.queued + e.arriving for e in self._models.engines())

    def _running(self) -> int:
        return sum(e.engine.scheduler.active_rows for e in self._models.engines())

    def _record_state(self) -> None:
        self._recorder.set_state(
            queued=self._queued(),
            running=self._running(),
            active_memory=mx.get_active_memory(),
            store_bytes=self._models.store_bytes(),
        )


def _refused(request: GenerateRequest, fault: Fault | None) -> MLXProviderError:
    """The error that the client gets, also for what a template, parser or grammar raised."""
    if fault is None:
        return EngineDied("the engine is shutting down")
    told = fault.of_request("its preparation")
    log.log(
        logging.INFO if fault.ours else logging.ERROR,
        "request %s of %.200s refused: %s %s: %.2000s%s",
        request.id, request.model, told.status, told.code, told.message,
        "" if fault.ours else f"\n{fault.trace}",
    )  # fmt: skip
    return told


def warm_requests(
    first: GenerateRequest, given: Sequence[str | WarmPrompt]
) -> list[GenerateRequest]:
    """One-token requests for warm prompts, from who sent `first`."""
    options = first.options.model_copy(update={"warm": []})
    prompts = [
        WarmPrompt(messages=[{"role": "system", "content": each}])
        if isinstance(each, str)
        else each
        for each in given
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
