"""Runs the prompts of one call of `/completions` as one generation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from ..errors import BadRequest
from ..protocol.event_queue import EventQueue
from ..protocol.events import Accepted, Delta, Done, Event, Failed, Finish, Timings, Usage
from ..protocol.requests import GenerateRequest, ModelRequest
from .generation import Generation

Submit = Callable[[ModelRequest], Generation]


def submit_all(submit: Submit, requests: Sequence[ModelRequest]) -> Generation:
    """Choices of request i follow those of the requests before it. Usage is summed. With `echo`,
    each choice begins with its prompt. A request that is refused or fails ends the others. Raises
    like `submit`, and names the prompt at fault."""
    texts = [request for request in requests if isinstance(request, GenerateRequest)]
    if len(requests) == 1 and not any(request.echo for request in texts):
        return submit(requests[0])
    parts: list[Generation] = []
    with ExitStack() as undo:
        undo.callback(_close, parts)
        for request in texts:
            parts.append(_submit(submit, request, len(parts), len(texts)))
        undo.pop_all()
    return _Merge(texts, parts).begin()


def _submit(submit: Submit, request: GenerateRequest, index: int, count: int) -> Generation:
    try:
        return submit(request)
    except BadRequest as error:
        if count == 1:
            raise
        raise type(error)(f"prompt[{index}]: {error.message}", param="prompt") from None


def _close(parts: Sequence[Generation]) -> None:
    for part in parts:
        part.close()


class _Merge:
    def __init__(self, requests: Sequence[GenerateRequest], parts: Sequence[Generation]) -> None:
        self._parts = parts
        self._queue = EventQueue()
        self._done: list[Done] = []
        counts = [request.n for request in requests]
        self._first = [sum(counts[:i]) for i in range(len(counts))]
        self._echoes = {
            first + i: part.accepted.echo
            for first, part, count in zip(self._first, parts, counts, strict=True)
            for i in range(count)
            if part.accepted.echo
        }

    def begin(self) -> Generation:
        """Closing or deleting the generation ends every part."""
        merged = Generation(
            _merge_accepted([part.accepted for part in self._parts]),
            self._queue,
            partial(_close, self._parts),
        )
        threading.Thread(target=asyncio.run, args=(self._merge(),), daemon=True).start()
        return merged

    async def _merge(self) -> None:
        await asyncio.gather(*map(self._relay, self._first, self._parts))

    async def _relay(self, first: int, part: Generation) -> None:
        while events := await part.aget():
            self._queue.put([each for event in events for each in self._translate(first, event)])
            if any(isinstance(event, Failed) for event in events):
                _close(self._parts)

    def _translate(self, first: int, event: Event) -> list[Event]:
        if isinstance(event, Delta):
            index = first + event.index
            content = self._echoes.pop(index, "") + event.content
            return [event.model_copy(update={"index": index, "content": content})]
        if isinstance(event, Finish):
            index = first + event.index
            echo = self._echoes.pop(index, "")  # a choice without text
            end = event.model_copy(update={"index": index})
            return [Delta(index=index, content=echo), end] if echo else [end]
        if isinstance(event, Done):
            self._done.append(event)
            return [_all_done(self._done)] if len(self._done) == len(self._parts) else []
        return [event]


def _merge_accepted(all_of: Sequence[Accepted]) -> Accepted:
    return all_of[0].model_copy(
        update={
            "prompt_tokens": sum(each.prompt_tokens for each in all_of),
            "warnings": list(dict.fromkeys(text for each in all_of for text in each.warnings)),
        }
    )


def _all_done(ends: Sequence[Done]) -> Done:
    usages = [end.usage.model_dump() for end in ends]
    timings = [end.timings for end in ends]
    return Done(
        usage=Usage(**{name: sum(usage[name] for usage in usages) for name in usages[0]}),
        timings=Timings(
            queued=min(each.queued for each in timings),
            prefill=sum(each.prefill for each in timings),
            first_token=min(each.first_token for each in timings),
            total=max(each.total for each in timings),
            tokens_per_second=sum(each.tokens_per_second for each in timings),
        ),
    )
