"""The parts of one choice: its detokenizer, its text state machine, its grammar."""

from __future__ import annotations

from ..chat.constraints.forecast import CallForecast
from ..chat.output.reply import Reply
from ..engine.detokenizer import Detokenizer, marker_tokens
from ..engine.request import Request, Row, RowConstraint
from ..families.tokenizer.template_fit import call_ids, short_id
from ..protocol.requests import GenerateRequest
from .model_view import ModelView
from .structure import Form, ThinkingBudget


def make_row(
    request: Request, index: int, wire: GenerateRequest, form: Form, view: ModelView
) -> Row:
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
    forecast = CallForecast(calls) if calls is not None and calls.marker else None
    return Row(request, index, reply, constraint, forecast)


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
        taken_ids=call_ids(wire.messages or ()) if form.tool_parser else (),
    )
