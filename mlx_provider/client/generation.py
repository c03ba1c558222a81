"""The reply to one request, or to all prompts of one call of `/completions`, as one generation."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial

from ..errors import BadRequest
from ..protocol.event_queue import EventQueue
from ..protocol.events import Accepted, Delta, Done, Event, Failed, Finish, Usage
from ..protocol.requests import GenerateRequest, ModelRequest


class Generation:
    """An accepted request. `get` blocks a thread, `aget` suspends a task; both return the events
    since the last call, and an empty list once `Done` or `Failed` was read (see `EventQueue`).
    Deleting the object cancels the request."""

    def __init__(self, accepted: Accepted, events: EventQueue, cancel: Callable[[], None]) -> None:
        self.accepted = accepted
        self.events = events
        self.get, self.aget = events.get, events.aget
        self._finalizer = weakref.finalize(self, cancel)
        if (replies := REPLIES.get()) is not None:
            replies.append(weakref.ref(self))

    def __iter__(self) -> Iterator[Event]:
        """Raises the error of `Failed`."""
        while events := self.get():
            for event in events:
                if isinstance(event, Failed):
                    raise event.error.exception()
                yield event

    def close(self) -> None:
        """Cancels the rest of the request. Idempotent, never blocks, safe from any thread."""
        if self.events.ended:
            self._finalizer.detach()
        self._finalizer()


REPLIES: ContextVar[list[weakref.ref[Generation]] | None] = ContextVar("replies", default=None)
"""A list that is set here collects the replies that begin in this context."""

Submit = Callable[[ModelRequest], Generation]


def submit_all(submit: Submit, requests: Sequence[ModelRequest]) -> Generation:
    """Submit all, and join their replies: choices of request i follow those of the requests before
    it, and usage is summed. With `echo`, each choice begins with its prompt. A request that is
    refused or fails ends the others. Raises like `submit`, and names the prompt at fault."""
    texts = [request for request in requests if isinstance(request, GenerateRequest)]
    if len(requests) == 1 and not any(request.echo for request in texts):
        return submit(requests[0])
    parts: list[Generation] = []
    with ExitStack() as undo:
        undo.callback(_close, parts)
        try:
            for request in texts:
                part = submit(request)
                parts.append(part)
        except BadRequest as error:
            if len(texts) == 1:
                raise
            message = f"prompt[{len(parts)}]: {error.message}"
            raise type(error)(message, param="prompt") from None
        undo.pop_all()
    queue, accepted = EventQueue(), [part.accepted for part in parts]
    total = {
        "prompt_tokens": sum(part.prompt_tokens for part in accepted),
        "warnings": list(dict.fromkeys(text for part in accepted for text in part.warnings)),
    }
    merging = _merge([request.n for request in texts], parts, queue)
    threading.Thread(target=asyncio.run, args=(merging,), daemon=True).start()
    return Generation(accepted[0].model_copy(update=total), queue, partial(_close, parts))


def _close(parts: Sequence[Generation]) -> None:
    for part in parts:
        part.close()


async def _merge(counts: Sequence[int], parts: Sequence[Generation], queue: EventQueue) -> None:
    ends: list[Done] = []

    async def relay(first: int, count: int, part: Generation) -> None:
        echoes = dict.fromkeys(range(count), part.accepted.echo or "")

        def translate(event: Event) -> Iterator[Event]:
            if isinstance(event, Done):
                ends.append(event)
                if len(ends) == len(parts):
                    yield _all_done(ends)
            elif isinstance(event, Delta | Finish):
                index, echo = first + event.index, echoes.pop(event.index, "")
                if isinstance(event, Delta):
                    yield event.model_copy(update={"index": index, "content": echo + event.content})
                    return
                if echo:  # a choice without text
                    yield Delta(index=index, content=echo)
                yield event.model_copy(update={"index": index})
            else:
                yield event

        while events := await part.aget():
            queue.put([translated for event in events for translated in translate(event)])
            if any(isinstance(event, Failed) for event in events):
                _close(parts)

    firsts = [sum(counts[:i]) for i in range(len(counts))]
    await asyncio.gather(*map(relay, firsts, counts, parts))


def _all_done(ends: Sequence[Done]) -> Done:
    usages = [end.usage.model_dump() for end in ends]
    rate = sum(end.timings.tokens_per_second for end in ends)
    return Done(
        usage=Usage(**{name: sum(usage[name] for usage in usages) for name in usages[0]}),
        timings=ends[-1].timings.model_copy(update={"tokens_per_second": rate}),
    )
