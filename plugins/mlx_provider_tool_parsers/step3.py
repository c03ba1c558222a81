"""Step 3: `steptml` invocations in a section of calls."""

from __future__ import annotations

from dataclasses import replace

from mlx_provider import CallGrammar, TaggedArguments, ToolParser
from mlx_provider.records import NotACall, Reading, TextReader, Tools, claimed, through

from .invoke_tags import invoke
from .json_text import CallObject, ignore
from .tagged import read_call

BEGIN, END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
CALL, CALL_END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
SEPARATOR = "<｜tool_sep｜>"
FORM = replace(invoke("", "steptml:", bare=True, lines=False), blocks=(CALL,), block_end=CALL_END)


def scan(reader: TextReader, tools: Tools) -> Reading[None]:
    """One section. Markers between its invocations are dropped."""
    yield from reader.expect(BEGIN)
    before = reader.calls
    while True:
        found = yield from reader.pass_until((FORM.call, SEPARATOR, END, BEGIN), ignore)
        if found == FORM.call:
            yield from claimed(read_call(FORM, reader, tools), through(END))
            continue
        if found != SEPARATOR:
            reader.skip(len(found) if found == END else 0)
            break
        reader.skip(len(found))
        yield from reader.space()
        if (yield from reader.at("{")):
            yield from claimed(CallObject(reader).read(), through(END))
    if reader.calls == before:
        raise NotACall("a section without a call")


PARSERS = (
    ToolParser(
        name="step3",
        start=BEGIN,
        end=END,
        scan=scan,
        markers=(CALL, SEPARATOR, CALL_END),
        detect=lambda template: "steptml:invoke" in template,
        rank=3,
        grammar=CallGrammar(
            f'{CALL}function{SEPARATOR}{FORM.call} name="{{name}}">',
            f"{FORM.call_end}{CALL_END}",
            BEGIN,
            END,
            tagged=TaggedArguments(f'{FORM.key} name="', '">', FORM.value_end, barred=FORM.traps),
        ),
    ),
)
