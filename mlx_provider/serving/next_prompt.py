"""Prefills what is known before its request: the operator's warm prompts, and the head of a
conversation's next prompt while the tools of its last turn run.

The tokens of the reply are often not that head: clients drop thoughts, and a template writes calls
in its own form. So history and reply are rendered with placeholders for the results, and what comes
before the first one is prefilled while no request is here."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..chat.messages.parts import reasoning_text
from ..engine.request import Request, Row, SamplingParams
from ..engine.worker import EngineWorker
from ..isolation import background
from ..protocol.event_queue import EventQueue
from ..protocol.events import Delta, Done, Event, Finish
from ..protocol.requests import GenerateRequest, Sampling, WarmPrompt
from ..records import Prompt, Tokenizer
from .permissions import tenant
from .prepared import NoText
from .prompt import render_prompt
from .weights import ModelView

RESULT, OTHER = "first result", "another one"
"""Placeholders for the first result of a turn, and for each further one."""
TAIL = 64
"""Tokens at the end of a prompt in which the placeholder is searched first."""


@dataclass(eq=False)
class ToolTurn:
    """A request, and its reply as the client will send it back."""

    wire: GenerateRequest
    view: ModelView
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    called: bool = False

    def take(self, events: Sequence[Event]) -> bool:
        """Add events of the reply. Returns whether tools run from now on."""
        for event in events:
            if isinstance(event, Delta):
                self._take(event)
            elif isinstance(event, Finish):
                self.called = event.reason == "tool_calls"
        return self.called and isinstance(events[-1], Done)

    def _take(self, delta: Delta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        for piece in delta.tool_calls:
            if piece.index == len(self.calls):
                function = {"name": piece.name, "arguments": ""}
                self.calls.append({"id": piece.id, "type": "function", "function": function})
            self.calls[piece.index]["function"]["arguments"] += piece.arguments

    def histories(self) -> Iterator[list[Mapping[str, Any]]]:
        """Possible messages of the next request, up to its results. Both with and without thoughts
        until the client has shown which it sends."""
        before = self.wire.messages or []
        said = {"role": "assistant", "content": self.content or None, "tool_calls": self.calls}
        returned = [bool(reasoning_text(m)) for m in before if m.get("tool_calls")]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": OTHER if at else RESULT}
            for at, call in enumerate(self.calls)
        ]
        if self.reasoning and (any(returned) or not returned):
            yield [*before, {**said, "reasoning_content": self.reasoning}, *results]
        if not self.reasoning or not any(returned):
            yield [*before, said, *results]


def turn_of(wire: GenerateRequest, view: ModelView, prompt: Prompt) -> ToolTurn | None:
    """The turn of a request with tools. `None`: it cannot call, has several choices, or images."""
    calls = wire.messages and wire.tool_choice != "none"
    return ToolTurn(wire, view) if calls and wire.n == 1 and not prompt.spans else None


class NextPrompts:
    """Renders next prompts in its own thread and prefills them, only while every engine is idle."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlx-next-prompt")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def await_results(self, turn: ToolTurn) -> None:
        """Called on the engine thread when the tools of a turn begin to run."""
        self._worker.when_idle(partial(self._pool.submit, self._render, turn))

    def _render(self, turn: ToolTurn) -> None:
        with background(f"request {turn.wire.id}: its next prompt"):
            for request in _requests(turn):
                begin = partial(self._begin, turn.view, request)  # rendering may have taken long
                self._worker.call(partial(self._worker.when_idle, begin))

    def _begin(self, view: ModelView, request: Request) -> None:
        instance = view.weights.started
        if instance is not None and self._worker.steps(instance.engine):
            instance.engine.prefill_in_background(request)


def _requests(turn: ToolTurn) -> Iterator[Request]:
    wire, view = turn.wire, turn.view
    of_sender = partial(Request, salt=wire.namespace, tenant=tenant(wire), session=wire.session)
    for at, messages in enumerate(turn.histories()):
        rendered = render_prompt(view, wire.model_copy(update={"messages": messages}))
        head = known_head(rendered.prompt, view.model.tokenizer)
        if head is not None:
            name, params = f"{wire.id} ahead {at}", SamplingParams()
            request = of_sender(name, head, params, 0, EventQueue(), drafts=False, may_skip=False)
            request.rows = [Row(request, 0, NoText())]
            yield request


def known_head(prompt: Prompt, tokenizer: Tokenizer) -> Prompt | None:
    """The prompt before `RESULT`, without the last token, which another result may change. `None`:
    the template does not show the result."""

    def shows(width: int) -> bool:
        return RESULT in tokenizer.decode(prompt.tokens[-width:], skip_special=False)

    total = len(prompt.tokens)
    most = TAIL  # find the fewest last tokens that show it: double, then halve from `least`
    while not shows(min(most, total)):
        if most >= total:
            return None
        most *= 2
    least = 0
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if shows(middle) else (middle, most)
    end = total - most - 1
    points = tuple(at for at in prompt.snapshot_points if at < end)
    positions = None if prompt.positions is None else prompt.positions[:, :end]
    return Prompt(prompt.tokens[:end], positions=positions, snapshot_points=points)


def warm_requests(
    first: GenerateRequest, given: Sequence[str | WarmPrompt]
) -> list[GenerateRequest]:
    """Requests that prefill the operator's warm prompts for the sender and model of `first`."""
    options = first.options.model_copy(update={"warm": []})
    prompts = [
        WarmPrompt(messages=[{"role": "system", "content": prompt}])
        if isinstance(prompt, str)
        else prompt
        for prompt in given
    ]
    return [
        GenerateRequest(
            model=first.model,
            messages=_with_user(prompt.messages),
            tools=prompt.tools,
            max_tokens=1,
            sparse_prefill=False,
            sampling=Sampling(temperature=0),
            template=first.template,
            origin=first.origin,
            salt=first.salt,
            tenant=first.tenant,
            share=first.share,
            options=options,
        )
        for prompt in prompts
    ]


def _with_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds a user message: a template may refuse a conversation without one."""
    if messages and messages[-1].get("role") == "system":
        return [*messages, {"role": "user", "content": "."}]
    return messages
