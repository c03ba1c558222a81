"""The form that a request demands of its reply, and the parts of each choice: detokenizer, text
state machine, grammar."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..chat.constraints.call_text import CallMatchers, CallPredictor
from ..chat.constraints.compiler import Thoughts
from ..chat.constraints.request import demanded_names
from ..chat.output.reply import Reply
from ..chat.output.turn_layout import NO_LAYOUT, TurnLayout
from ..chat.output.whole_reply import WholeReply, read_chunks
from ..engine.request import Request, Row, RowConstraint
from ..errors import BadRequest
from ..families.tokenizer.template import call_ids
from ..protocol.requests import GenerateRequest
from ..records import ReasoningParser, ToolParser, listed_parameters
from ..records.json_reading import function_of
from ..records.parsing import short_id
from ..upstream.detokenizer import Detokenizer, marker_tokens
from .weights import ModelView

if TYPE_CHECKING:
    from ..chat.constraints.compiler import Structure

FORESEEN = 8
"""Tokens that copies of a constraint may be ahead of the reply."""


@dataclass(frozen=True)
class Form:
    tool_parser: ToolParser | None
    reasoning_parser: ReasoningParser | None
    reasoning_open: bool  # whether the reply begins inside a thought
    structure: Structure | None
    calls: CallMatchers | None = None  # predicts the text of calls that no grammar forces
    thought_end: str = ""  # empty: no end can be forced
    warnings: tuple[str, ...] = ()
    layout: TurnLayout = NO_LAYOUT  # white space of the template around the reply's texts


def form_of(view: ModelView, request: GenerateRequest, text: str) -> Form:
    """The form of the reply to the rendered prompt `text`. Host work. Raises `BadRequest`."""
    chat = request.messages is not None
    reasoning = view.reasoning_parser if chat else None
    opened = reasoning is not None and _opened(text, reasoning)
    tools = _tool_parser(view, request) if chat else None
    messages = reasoning.grammar if reasoning else None  # if each message has an address
    structure = None
    if _demands(request):
        if tools is not None:
            check_readable(request, tools)
        calls = tools.call_grammar() if tools else None
        thoughts = None
        if reasoning is not None and reasoning.closers():
            barred = tools.openers() if tools else ()
            thoughts = Thoughts(reasoning.start, reasoning.closers(), opened, barred)
        structure = view.weights.grammar.structure(request, calls, thoughts, messages)
    warnings = list(structure.warnings) if structure else []
    if tools is not None and request.tool_grammars and structure is None:
        reason = "no special token of this model begins a call"
        warnings.append(f"the formats of tools are not enforced: {reason}")
    if tools is not None and view.tool_parser is None:
        reason = "the model's chat template shows no known tool format"
        warnings.append(f"{reason}: calls are read as {tools.name}")
    end = reasoning.end if reasoning else ""
    if messages:
        end = messages.thought_end
    if request.thinking_budget is not None and not end:
        warnings.append("thinking_budget has no effect: the model's thoughts are not marked off")
    openers = reasoning.openers() if reasoning else ()
    last = request.messages[-1] if request.messages else {}
    # false if the reply continues a given text; a raw prompt may end anywhere
    begins = last.get("role", "assistant") != "assistant"
    layout = view.layout.after(text, openers, begins=begins)
    matchers = None
    if tools and request.drafts:
        matchers = CallMatchers(view.weights.grammar, request, tools)
    return Form(tools, reasoning, opened, structure, matchers, end, tuple(warnings), layout)


def _tool_parser(view: ModelView, request: GenerateRequest) -> ToolParser | None:
    if not request.tools or request.tool_choice == "none":
        return None
    fallback = view.any_parser if request.tool_choice == "auto" else view.forced_parser
    return view.tool_parser or fallback


def _demands(request: GenerateRequest) -> bool:
    return bool(
        request.grammar
        or request.response_format
        or request.tool_choice not in ("none", "auto")
        or (request.tool_grammars and request.tool_choice != "none")
    )


def _opened(text: str, reasoning: ReasoningParser) -> bool:
    """Whether a reply begins inside a thought. Models of some formats begin so although their
    template writes no opener, except after a thought that the template has closed."""
    tail, closers = text.rstrip(), reasoning.closers()
    if tail.endswith(reasoning.openers()):
        return True
    return reasoning.unmarked == "reasoning" and bool(closers) and not tail.endswith(closers)


def check_readable(request: GenerateRequest, parser: ToolParser) -> None:
    """Write a call of each callable tool as the grammar does, with all parameters. Raise
    `BadRequest` for a tool whose call the parser does not read back."""
    names = demanded_names(request)
    for tool in request.tools:
        function = function_of(tool)
        name = function.get("name")
        if not isinstance(name, str) or (names and name not in names):
            continue
        parameters = function.get("parameters")
        schema = parameters if isinstance(parameters, dict) else {}
        keys = tuple(listed_parameters(schema)[0])
        text = parser.call_grammar().write(name, dict.fromkeys(keys, "x"), schema)
        found = read_chunks([text], tool_parser=parser, tools=request.tools)
        calls = found.whole_calls
        read = [(called, isinstance(args, dict) and tuple(args)) for called, args in calls]
        if found.cut_calls or read != [(name, keys)]:
            raise _unreadable(name, found, parser)


def _unreadable(name: str, found: WholeReply, parser: ToolParser) -> BadRequest:
    lost = "its parameters" if [name] == [called for called, _ in found.calls] else "it"
    return BadRequest(
        f"tool {name!r} cannot be enforced: calls of it are not readable in this model's "
        f"call format ({'; '.join(found.faults) or parser.name}); rename {lost}, or leave "
        "tool_choice at auto",
        param="tools",
    )


def make_row(
    request: Request, index: int, wire: GenerateRequest, form: Form, view: ModelView
) -> Row:
    """The row of choice `index`, with all that its reply needs."""
    reply = _reply(index, wire, form, view)
    constraint: RowConstraint | None = None
    if form.structure is not None:
        first = form.structure.constraint
        constraint = first if index == 0 else first.fork()
    if wire.thinking_budget is not None and form.thought_end:
        end = view.model.tokenizer.encode(form.thought_end, special=False)
        budget = ThinkingBudget(wire.thinking_budget, end, view.model.info.vocab_size, constraint)
        budget.reply = reply
        constraint = budget
    calls = form.calls
    predictor = CallPredictor(calls) if calls is not None and calls.marker else None
    return Row(request, index, reply, constraint, predictor)


def _reply(index: int, wire: GenerateRequest, form: Form, view: ModelView) -> Reply:
    tokenizer = view.model.tokenizer
    parsers = [p for p in (form.tool_parser, form.reasoning_parser) if p is not None]
    markers = [marker for parser in parsers for marker in parser.visible()]
    short = view.model.info.template.short_ids
    call = f"call_{wire.id[:16]}_{index}"  # not `wire` itself, which holds the request's images

    def call_id(number: int) -> str:
        return short_id(f"{call}_{number}") if short else f"{call}_{number}"

    return Reply(
        Detokenizer(tokenizer, visible=marker_tokens(tokenizer, markers)),
        stops=wire.stop,
        tools=wire.tools if form.tool_parser else (),
        tool_parser=form.tool_parser,
        reasoning_parser=form.reasoning_parser,
        reasoning_open=form.reasoning_open,
        parallel=wire.parallel_tool_calls,
        index=index,
        layout=form.layout,
        ids=call_id,
        used_ids=call_ids(wire.messages or ()) if form.tool_parser else (),
    )


class ThinkingBudget:
    """A `RowConstraint` that forces the marker `end` after `budget` tokens of thoughts. For all
    other tokens, `inner` applies."""

    def __init__(
        self, budget: int, end: Sequence[int], vocab_size: int, inner: RowConstraint | None
    ) -> None:
        self._left = budget
        self._end = list(end)
        self._words = (vocab_size + 31) // 32
        self._inner = inner
        self._written = 0
        self.reply: Reply | None = None

    def mask(self) -> NDArray[np.uint32] | None:
        """The marker's next token while it is forced, else the grammar's mask."""
        if self._forcing:
            token = self._end[self._written]
            mask = np.zeros(self._words, dtype=np.uint32)
            mask[token // 32] = np.uint32(1 << token % 32)
            return mask
        return None if self._inner is None else self._inner.mask()

    def advance(self, token: int) -> None:
        if self._forcing:
            self._written = (self._written + 1) % len(self._end)
        else:
            self._left -= self._thinking
        if self._inner is not None:
            self._inner.advance(token)

    @property
    def finished(self) -> bool:
        return self._inner is not None and self._inner.finished

    def forced_tokens(self) -> Sequence[int]:
        if self._inner is None or self._forcing or self._thinking:
            return ()
        return self._inner.forced_tokens()

    def fork(self) -> RowConstraint | None:
        """A copy without the budget. `None` if the budget can end within a few tokens."""
        if self._forcing or (self._thinking and self._left <= FORESEEN):
            return None
        if self._inner is None:  # every token is allowed
            return ThinkingBudget(sys.maxsize, (), 0, None)
        return self._inner.fork()

    @property
    def _forcing(self) -> bool:
        return self._written > 0 or (self._left <= 0 and self._thinking)

    @property
    def _thinking(self) -> bool:
        return self.reply is not None and self.reply.in_reasoning
