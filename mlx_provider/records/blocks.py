"""Reads blocks of calls between two markers: a block is reported, shown as text, or dropped.
`read_block` runs the generator of `scan_block`, and decides which of the three if that fails."""

import re

from .json_reading import function_of
from .parsing import Parse, ToolCall, ToolParser, Tools
from .reading import Emit, NotACall, Reading, Rest, T, TextEnded, TextReader, ends_within


def read_block(
    reader: TextReader,
    scan: Reading[None],
    parser: ToolParser,
    marker: str,
    emit: Emit,
    tools: Tools = (),
) -> Reading[bool]:
    """Read a block of calls at `marker` with `scan`. False: it was text, and went to `emit`.

    | `scan` fails                 | before a call was reported           | after one          |
    |------------------------------|--------------------------------------|--------------------|
    | in a call that the end cuts  | dropped if it begins a call, or text | stays unfinished   |
    | as no call, at the end       | dropped if it begins a call, or text | dropped with tools |
    | as no call, before the end   | text                                 | shown as content   |
    """
    start, before = reader.mark(), reader.calls
    if (yield from read_empty(reader, marker, parser.closers())):
        return True
    try:
        yield from scan
        if reader.position > start:
            return True
        failure: NotACall | TextEnded = NotACall("the parser read nothing")
    except (NotACall, TextEnded) as error:
        failure = error
    # the reply ends inside text that could have become a call
    cut_off = isinstance(failure, TextEnded) or (
        reader.closed and (not reader.ahead() or ends_within(reader, parser.visible()))
    )
    if reader.calls == before and cut_off:
        reader.rewind(start)
        text = reader.skip(len(reader.ahead()))
        dropped = _begins_call(text, parser, marker, tools)
        if not dropped:
            emit(text)
        return dropped
    if isinstance(failure, TextEnded):  # in a call that was reported, which stays unfinished
        return True
    if reader.calls == before:
        yield from _show_text(reader, marker, emit, start, failure)
        return False
    if cut_off and tools:  # what may be one more call is dropped
        reader.abandon_call()
        reader.skip(len(reader.ahead()))
    else:
        yield from _show_malformed(reader, parser, marker, start, failure)
    return True


def scan_block(parser: ToolParser, reader: TextReader, tools: Tools) -> Reading[None]:
    """The generator that reads one block by the parser's own means; the reader stands on its
    opening marker. `read_block` runs it and deals with its failures."""
    if parser.scan is None:
        openers = (*parser.openers(), *parser.first)
        return read_marked(reader, openers, parser.end, parser.parse, tools)
    if parser.atomic:
        return _scan_atomic(parser.scan(reader, tools), reader)
    return parser.scan(reader, tools)


def _scan_atomic(scan: Reading[None], reader: TextReader) -> Reading[None]:
    before, finished = reader.calls, False
    reader.hold()
    try:
        yield from scan
        finished = True
    except NotACall as failure:
        whole = failure.whole or reader.calls > before
        raise NotACall(str(failure), whole=whole, rest=failure.rest) from failure
    finally:
        reader.let_go(keep=finished)


def _begins_call(text: str, parser: ToolParser, marker: str, tools: Tools) -> bool:
    """Whether the text from `marker` to the end of the reply is a call that was cut."""
    if not marker.rstrip("[{"):
        return _names_tool(text, tools)
    body = text[len(marker) :]
    if not body.strip():
        return True
    if tools:
        return not (_PROSE.match(body) or any(end in body for end in parser.closers()))
    return parser.cut == "drop"


_PROSE = re.compile(r"[^\w<>\[\]{}()|]*\w+[,.;:!?]*[ \t]+\w[^<>\[\]{}()|=]*\Z")
"""Several words and no markup: a sentence that mentions the marker."""
_NAME = re.compile(
    r"""[\[\s]*(?:\{.{0,200}?"(?:name|function|tool_name)"\s*:\s*")?([\w.:/-]+)""", re.DOTALL
)
"""The name of a call, perhaps cut: bare, or a value near the beginning of an object."""


def _names_tool(text: str, tools: Tools) -> bool:
    """Whether a cut text that begins with a bracket has begun to name one of the tools."""
    if not (found := _NAME.match(text)):
        return False
    known = [str(name) for tool in tools if (name := function_of(tool).get("name"))]
    complete, written = found.end() < len(text), found[1]
    return written in known if complete else any(name.startswith(written) for name in known)


def _show_text(
    reader: TextReader, marker: str, emit: Emit, start: int, failure: NotACall
) -> Reading[None]:
    size = reader.position - start if failure.whole else len(marker)
    reader.rewind(start)
    emit(reader.skip(size))
    if failure.rest is not None:
        yield from failure.rest(reader, emit)


def _show_malformed(
    reader: TextReader, parser: ToolParser, marker: str, start: int, failure: NotACall
) -> Reading[None]:
    """Show the text since the last complete call."""
    reader.abandon_call()
    reader.answer()  # calls end a thought, so that the text is content
    reader.content(reader.between(max(start, reader.calls_end), reader.position))
    if failure.rest is not None:
        yield from failure.rest(reader, reader.content)
    elif parser.end and not marker.endswith(("[", "{")):
        yield from through(*parser.closers())(reader, reader.content)


def read_empty(reader: TextReader, marker: str, closers: tuple[str, ...]) -> Reading[bool]:
    """Read an empty list of calls: markers with nothing or `[]` between them, or a marker with `[]`
    after it. False: there is none here. A `[]` without a marker, or in a code fence, is an answer.
    """
    word = marker.rstrip("[{")
    if not word or word.startswith("```"):
        return False
    mark = reader.mark()
    reader.skip(len(word))
    yield from reader.space()
    opened = yield from reader.accept("[")
    yield from reader.space()
    empty = bool(opened and (yield from reader.accept("]")))
    yield from reader.space()
    ended = "" if opened and not empty else (yield from reader.accept(*closers))
    if not ended and not empty:
        reader.rewind(mark)
        return False
    reader.release()
    return True


_MOST_MARKERS = 16
"""Maximum number of markers in the arguments of one call."""


def read_marked(
    reader: TextReader, openers: tuple[str, ...], end: str, parse: Parse, tools: Tools
) -> Reading[None]:
    """Read one block and report its calls; the reader is at one of `openers`. The block ends at the
    first end at which `parse` succeeds, and with the reply if `end` is empty: a marker inside an
    argument is text. If it succeeds at none of as many ends as openers, and there is an opener
    inside the block or behind it, the block is text."""
    yield from reader.accept(*openers)
    text, opened_inside, failed_ends = "", 0, 0
    for _ in range(_MOST_MARKERS + 1):
        parts: list[str] = []
        found = yield from reader.pass_until((end, *openers) if end else (), parts.append)
        text += "".join(parts)
        if found and found != end:
            if failed_ends > opened_inside:
                raise NotACall("no call", whole=True)
            opened_inside += 1
        elif _report_parsed(reader, found, parse, text, tools):
            return
        elif not found:
            raise TextEnded
        else:
            failed_ends += 1
        text += reader.skip(len(found))
        if 0 < opened_inside < failed_ends:
            raise NotACall("no call", whole=True)
    rest = _through_blocks((end,), openers, depth=1 + opened_inside - failed_ends)
    raise NotACall("no call between all these markers", rest=rest)


def _report_parsed(reader: TextReader, found: str, parse: Parse, text: str, tools: Tools) -> bool:
    """Report the calls in `text`; `found` is the end marker after it. False: it is no call."""
    try:
        calls = parse(text, tools)
    except (ValueError, RecursionError):  # `json.loads` of a thousand brackets raises the latter
        return False
    if not calls:
        raise NotACall("no call")
    reader.skip(len(found))
    for call in calls:
        report_call(reader, call)
    return True


def report_call(reader: TextReader, call: ToolCall) -> None:
    """Report a whole call. Raises `TypeError` for the call of a broken parser."""
    if not isinstance(call.name, str) or not isinstance(call.arguments, str):
        raise TypeError(f"name and arguments of a call are text, not {call!r}")
    reader.call(call.name)
    reader.arguments(call.arguments)
    reader.end_call()


def claim(reading: Reading[T], rest: Rest | None = None) -> Reading[T]:
    """Run `reading`, whose text can only be a call: if it raises `NotACall`, all of its text is
    shown, and no call is looked for in it. `rest`: used if the failure has none."""
    try:
        return (yield from reading)
    except NotACall as failure:
        raise NotACall(str(failure), whole=True, rest=failure.rest or rest) from failure


def through(*ends: str) -> Rest:
    """Shows the text up to the first of `ends`, which is included, or to the reply's end."""
    return _through_blocks(ends)


def _through_blocks(ends: tuple[str, ...], openers: tuple[str, ...] = (), depth: int = 1) -> Rest:
    """Shows the text until `depth` open blocks, and those that open in it, have ended."""

    def rest(reader: TextReader, emit: Emit) -> Reading[None]:
        left = depth
        while left > 0 and (found := (yield from reader.pass_until((*ends, *openers), emit))):
            emit(reader.skip(len(found)))
            left += -1 if found in ends else 1

    return rest
