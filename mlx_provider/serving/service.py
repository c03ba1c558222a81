"""Serves requests: gets each its model, prepares and admits it, and delivers its events."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from math import inf
from os import getpid

import mlx.core as mx

from ..byte_gate import ByteGate
from ..chat.media.load import MediaRoom
from ..engine.request import Request
from ..engine.step_output import Post
from ..engine.worker import EngineWorker
from ..errors import (
    BadRequest,
    ContextTooLong,
    EngineDied,
    MLXProviderError,
    RequestFailed,
    for_another,
)
from ..isolation import Fault, plugin_call
from ..logs import Trace
from ..protocol.event_queue import Deliver, EventQueue
from ..protocol.events import Accepted, Done, Failed
from ..protocol.health import Health, PluginStatus, Stats
from ..protocol.requests import EmbedRequest, GenerateRequest, ModelRequest, WarmPrompt
from ..registry import Plugin, PluginRegistry
from ..settings import EngineSettings
from ..upstream.runtime import active_blas
from .hub import full_name
from .metrics import EngineMetrics
from .model_cache import ModelCache
from .next_prompt import NextPrompts, turn_of, warm_requests
from .permissions import Permissions, names_repository, read_permissions, tenant
from .prepared import prepare_embedding, prepare_generation, within_vocabulary
from .prompt import HostWork, prompt_text, render_prompt
from .residents import Lease
from .stats import Active, Entry, InFlight, take
from .weights import ModelView

log = logging.getLogger(__name__)

PREPARED_AT_ONCE = 2
"""Prompts that are prepared together. The oldest of each tenant never waits."""


@dataclass(frozen=True)
class PromptTokens:
    tokens: Sequence[int]
    text: str  # with special tokens
    context_length: int


class ChatService:
    """Serves all models of this process, on one engine thread. Safe from any thread."""

    def __init__(
        self,
        settings: EngineSettings,
        deliver: Deliver = lambda put: put(),
        registry: PluginRegistry | None = None,
    ) -> None:
        self._settings = settings
        file = settings.models_file
        granted = read_permissions(file) if file else {}
        self._permissions = Permissions(settings.model_roots, granted)
        self._recorder = EngineMetrics(self.stats)
        self._deliver = deliver
        self.worker = EngineWorker(self._deliver_posts, self._fail_all)
        self.media = MediaRoom(settings.media_bytes, settings.max_queue)
        self._preparing = ByteGate(PREPARED_AT_ONCE)
        self._plugins = registry or PluginRegistry.discover()
        self.models = ModelCache(
            settings, self._plugins, self.worker, self._recorder, media=lambda: self.media.nbytes
        )
        self.prefixes = self.models.prefixes
        self.in_flight = InFlight()
        self.next_prompts = NextPrompts(self.worker)
        self._warming = threading.Lock()

    def submit(self, request: ModelRequest, queue: EventQueue) -> Accepted:
        """Validate, render, tokenise, admit. Returns the first event; the others come in `queue`.
        Blocks (host work, model load). Raises the errors of `mlx_provider.errors`."""
        claim = self.media.claim(request.id, tenant(request))
        entry = Entry(request.id, queue, claim, request.model, time.monotonic())

        def refuse(fault: Fault) -> MLXProviderError:
            self.in_flight.leave(entry)
            return _refusal(request, fault)

        self.in_flight.arrive(entry)
        return plugin_call(lambda: self._accept(request, entry), refuse)

    def count(self, request: GenerateRequest) -> int:
        """Tokens of the prompt that `submit` would use; a lower limit if that exceeds the context.
        Blocks and raises like `submit`."""
        try:
            return len(self.tokenize(request).tokens)
        except ContextTooLong as error:
            return error.tokens

    def tokenize(self, request: GenerateRequest) -> PromptTokens:
        """The prompt that `submit` would use. Blocks and raises like `submit`."""
        return plugin_call(lambda: self._tokenize(request), partial(_refusal, request))

    def cancel(self, request_id: str) -> None:
        """End a request in any phase, also during `submit`. Ignores unknown ids; never blocks."""
        entry = self.in_flight.cancel(request_id)
        if entry is None:
            return
        if entry.active is None:
            self.media.refuse(RequestFailed.cancellation(), request_id)
            self._preparing.refuse(RequestFailed.cancellation(), request_id)
            self.models.queue.withdraw(request_id)
        elif self.worker.alive:
            active = entry.active
            self._call(partial(active.instance.engine.cancel, active.request))

    def _tokenize(self, wire: GenerateRequest) -> PromptTokens:
        request = self._permissions.apply(wire)
        view, lease = self._finder(request, time.monotonic())()
        with lease, closing(self.media.claim(wire.id, tenant(wire))) as media:
            try:
                prompt = render_prompt(view, request, media, partial(self._host_work, wire)).prompt
            except ContextTooLong as error:
                error.tokens = error.tokens or view.info.context_length
                raise
            within_vocabulary(prompt.tokens, view.info.vocab_size, "prompt")
            text = prompt_text(view, prompt)
            return PromptTokens(prompt.tokens, text, view.info.context_length)

    @contextmanager
    def _host_work(
        self, wire: ModelRequest, check_wanted: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Wait for a turn to prepare a prompt. Tenants share the turns equally."""
        with self._preparing.ask(1, tenant(wire), wire.id):
            check_wanted()
            yield

    def _accept(self, wire: ModelRequest, entry: Entry) -> Accepted:
        request = self._permissions.apply(wire)
        with ExitStack() as until_entered:
            view, lease, prepared, accepted = self._prepare(request, entry, until_entered)
            if isinstance(wire, GenerateRequest):
                self._warm(wire, request.options.warm, view)
            if isinstance(request, GenerateRequest) and request.tools:
                entry.turn = turn_of(request, view, prepared.prompt)
            active = self.in_flight.enter(entry, prepared, view, lease)
            self._call(partial(self._hand_over, active))  # never waits for the engine thread
            until_entered.pop_all()  # from now on, the entry releases the lease
        return accepted

    def _prepare(
        self, wire: ModelRequest, entry: Entry, until_entered: ExitStack
    ) -> tuple[ModelView, Lease, Request, Accepted]:
        """The engine's request, and a lease with bytes reserved for its rows.
        Their size is known only after the prompt is rendered, which needs the model. If other
        models leave too little memory, the request waits in the load queue without a lease."""
        find = self._finder(wire, entry.arrived)
        view, lease = find()
        until_entered.enter_context(lease)
        host_work = partial(self._host_work, wire, entry.check_wanted)
        prepared, accepted = _prepare_kind(wire, view, entry, host_work)
        while not lease.try_reserve(need := _need(prepared, view)):
            lease.release()
            entry.check_wanted()
            before, (view, lease) = view, find(rows=need)
            until_entered.enter_context(lease)
            if view is not before:
                prepared, accepted = _prepare_kind(wire, view, entry, host_work)
        return view, lease, prepared, accepted

    def _finder(self, wire: ModelRequest, arrived: float) -> Callable[..., tuple[ModelView, Lease]]:
        """A function that finds the model, and waits at most until the request's deadline."""
        return partial(
            self.models.use, wire.model, wire.options,
            who=wire.id, since=arrived, deadline=arrived + wire.timeout if wire.timeout else inf,
            repository=names_repository(wire), may_lengthen=self._permissions.may_lengthen(wire),
            listed=self._permissions.is_listed(wire),
        )  # fmt: skip

    def _warm(
        self, first: GenerateRequest, prompts: Sequence[str | WarmPrompt], view: ModelView
    ) -> None:
        """Submit the operator's warm prompts at the first request of a namespace."""
        with self._warming:
            if not (prompts and view.to_warm(first.namespace, prompts)):
                return
        for request in warm_requests(first, prompts):
            try:
                self.submit(request, EventQueue())
            except MLXProviderError as error:
                log.warning("a warm prompt of %s is left out: %s", first.model, error.message)

    def _hand_over(self, active: Active) -> None:
        self.in_flight.reach_engine(active)
        active.instance.engine.submit(active.request)

    def _deliver_posts(self, posts: list[Post]) -> None:
        """Deliver the events of one step (engine thread). Resources are released before the last
        event, so that its reader finds them free."""
        for request, events in posts:
            pair = self.in_flight.of(request)
            last = isinstance(events[-1], Done | Failed)
            if last:
                request.unlink()
            if pair is None:
                continue
            entry, active = pair
            entry.media.end_prefill()  # its first event is the end of its prefill
            if entry.turn is not None and entry.turn.take(events):
                self.next_prompts.await_results(entry.turn)
            if last:
                self.in_flight.leave(entry)
            elif entry.queue.ended:  # it accepts no more events
                active.instance.engine.cancel(request)
        self._deliver(partial(_put, posts))

    def _fail_all(self, error: MLXProviderError) -> None:
        """Report the death of the engine thread, or the end of its work, to all who wait."""
        entries = self.in_flight.clear()
        self.media.refuse(error)
        self._preparing.refuse(error)
        self.models.queue.close(error)
        failed = Failed.of(error)
        for entry in entries:
            entry.let_go()
            self._recorder.count("requests_failed", label=error.code)
            self._deliver(partial(entry.queue.put, [failed]))

    def close(self) -> None:
        """End running requests with an error, stop the engine thread, free the models."""
        error = EngineDied("the engine is shutting down")
        for active in self.in_flight.active():
            if self.worker.alive:
                self._call(partial(active.instance.engine.fail, active.request, error))
        self.next_prompts.close()
        self.models.close()
        self.worker.close()
        self._fail_all(error)
        self.models.drop()

    @property
    def alive(self) -> bool:
        """False after the death of the engine thread: nothing more is served."""
        return self.worker.alive

    def health(self) -> Health:
        engines, alive = self.models.engines(), self.worker.alive
        return Health(
            ok=alive,
            version=version("mlx-provider"),
            pid=getpid(),
            device=device_name(),
            blas=active_blas(),
            models=[s for view in self.models.views() if (s := view.status) is not None],
            plugins=[_plugin_status(plugin) for plugin in self._plugins.plugins],
            queued=sum(len(e.engine.scheduler.queued_jobs) + len(e.arriving) for e in engines),
            running=sum(e.engine.scheduler.active_rows for e in engines),
            active_memory=mx.get_active_memory(),
            detail=self.loading() if alive else "the engine thread does not run",
        )

    def loading(self, model: str | None = None) -> str:
        """The stages of the loads that run: of `model`, under any name, or of all. Empty: none."""
        # the name of a model with an adapter begins with the model's own
        start = "" if model is None else f"{full_name(model)} "
        stages = self.models.progress.stats()
        return "; ".join(s.summary for s in stages if f"{full_name(s.model)} ".startswith(start))

    def metrics(self) -> bytes:
        return self._recorder.exposition()

    def stats(self) -> Stats:
        """Waits at most briefly for the engine thread, never for the load of a model."""
        entries, media = self.in_flight.all(), self.media.nbytes
        return take(entries, self.models, device=device_name(), media=media)

    def _call(self, function: Callable[[], None]) -> None:
        def log_failure(future: Future[None]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None and not isinstance(error, MLXProviderError):
                log.error("a call to the engine thread failed", exc_info=error)

        self.worker.call(function).add_done_callback(log_failure)


def _prepare_kind(
    wire: ModelRequest, view: ModelView, entry: Entry, host_work: HostWork
) -> tuple[Request, Accepted]:
    if isinstance(wire, GenerateRequest):
        return prepare_generation(wire, view, entry.queue, entry.media, entry.arrived, host_work)
    if isinstance(wire, EmbedRequest):
        with host_work():
            return prepare_embedding(wire, view, entry.queue, entry.arrived, entry.check_wanted)
    raise BadRequest(f"{wire.path} is not served")


def _need(request: Request, view: ModelView) -> int:
    """Bytes for the request's rows. Raises `BadRequest` if they can never fit, and `Overloaded` if
    the engine's queue is full."""
    instance = view.weights.instance
    instance.engine.scheduler.check(request, instance.arriving)
    return instance.engine.scheduler.ledger.reservation(request.rows)


def _put(posts: list[Post]) -> None:
    for request, events in posts:
        request.events.put(events)


def _refusal(request: ModelRequest, fault: Fault) -> MLXProviderError:
    """Log why a request is refused, and return the error for its client."""
    summary = fault.of_request("its preparation")
    log.log(
        logging.INFO if fault.deliberate else logging.ERROR,
        "request %s of %.200s refused: %s %s: %.2000s%s",
        request.id, request.model, summary.status, summary.code, summary.message,
        "" if fault.deliberate else Trace(f"\n{fault.trace}"),
    )  # fmt: skip
    return for_another(summary)


def _plugin_status(plugin: Plugin) -> PluginStatus:
    return PluginStatus(
        name=plugin.name, distribution=plugin.distribution, version=plugin.version,
        in_use=plugin.error is None,
    )  # fmt: skip


def device_name() -> str:
    return str(mx.device_info().get("device_name") or mx.default_device())
