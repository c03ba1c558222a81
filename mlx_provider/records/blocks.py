"""Reads a block of a reply: an opening marker, one or more calls, and a closing marker.

`scan_block` makes the generator with which a parser reads a block. `read_block` runs it and, if it
fails, decides whether the text is shown or dropped. The second part of this file is what parsers
use in their own generators."""

import re

from .json_reading import function_of
from .parsing import Parse, ToolCall, ToolParser, Tools
from .reading import Emit, NotACall, Reading, ShowText, T, TextEnded, TextReader, ends_within

Failure = NotACall | TextEnded
_MOST_MARKERS = 16
"""Maximum number of markers in the text of one block."""
_PROSE = re.compile(r"[^\w<>\[\]{}()|]*\w+[,.;:!?]*[ \t]+\w[^<>\[\]{}()|=]*\Z")
"""Several words and no markup: a sentence that mentions the marker."""
_NAME = re.compile(
    r"""[\[\s]*(?:\{.{0,200}?"(?:name|function|tool_name)"\s*:\s*")?([\w.:/-]+)""", re.DOTALL
)
"""The name of a call, perhaps cut: bare, or a value near the beginning of an object."""


def scan_block(parser: ToolParser, reader: TextReader, tools: Tools) -> Reading[None]:
    """Make the generator for `read_block`. The reader must be at the opening marker."""
    if parser.scan is None:
        openers = (*parser.openers(), *parser.first)
        return read_marked(reader, openers, parser.end, parser.parse, tools)
    if parser.atomic:
        return _scan_atomic(parser.scan(reader, tools), reader)
    return parser.scan(reader, tools)


def _scan_atomic(scan: Reading[None], reader: TextReader) -> Reading[None]:
    """Report a call only when it is complete. The text of one that fails is shown whole."""
    before, complete = reader.calls_begun, False
    reader.hold_calls()
    try:
        yield from scan
        complete = True
    except NotACall as failure:
        whole = failure.whole or reader.calls_begun > before
        raise NotACall(str(failure), whole=whole, then=failure.then) from failure
    finally:
        reader.release_calls(keep=complete)


def read_block(
    reader: TextReader,
    scan: Reading[None],
    parser: ToolParser,
    marker: str,
    emit: Emit,
    tools: Tools,
) -> Reading[bool]:
    """Read the block that begins with `marker`, with the generator `scan` of `scan_block`. Returns
    `False` if it was text, which went to `emit`. After both results, call `reader.forget_marks`.

    | `scan` raises              | before a call was reported      | afterwards                 |
    |----------------------------|---------------------------------|----------------------------|
    | `TextEnded`                | drop a cut call, emit all other | the call stays unfinished  |
    | `NotACall`, the reply ends | drop a cut call, emit all other | drop with tools, else show |
    | `NotACall`, it goes on     | emit as text                    | show as content            |
    """
    start, before = reader.mark(), reader.calls_begun
    if (yield from _read_empty(reader, marker, parser.closers())):
        return True
    failure = yield from _run(scan, reader, start)
    if failure is None:
        return True
    if reader.calls_begun == before:
        if isinstance(failure, TextEnded) or _is_at_end(reader, parser):
            reader.rewind(start)
            text = reader.skip(len(reader.unread()))
            is_call = _is_cut_call(text, parser, marker, tools)
            if not is_call:
                emit(text)
            return is_call
        yield from _emit_text(reader, marker, emit, start, failure)
        return False
    if isinstance(failure, TextEnded):
        return True
    if tools and _is_at_end(reader, parser):
        reader.skip(len(reader.unread()))
    else:
        yield from _show_malformed(reader, parser, marker, start, failure)
    return True


def _run(scan: Reading[None], reader: TextReader, start: int) -> Reading[Failure | None]:
    """Return why `scan` failed. `None`: it has read a block."""
    try:
        yield from scan
    except (NotACall, TextEnded) as failure:
        return failure
    return None if reader.position > start else NotACall("the parser read nothing")


def _is_at_end(reader: TextReader, parser: ToolParser) -> bool:
    """Whether the reply has ended here or inside a marker, so that a call could have followed."""
    return reader.ended and (not reader.unread() or ends_within(reader, parser.visible()))


def _is_cut_call(text: str, parser: ToolParser, marker: str, tools: Tools) -> bool:
    """Whether `text`, from `marker` to the end of the reply, is the beginning of a call."""
    if not marker.rstrip("[{"):
        return _names_tool(text, tools)
    body = text[len(marker) :]
    if not body.strip():
        return True
    if tools:
        return not (_PROSE.match(body) or any(end in body for end in parser.closers()))
    return parser.cut == "drop"


def _names_tool(text: str, tools: Tools) -> bool:
    """Whether a cut text that begins with a bracket has begun to name one of the tools."""
    if not (found := _NAME.match(text)):
        return False
    known = [str(name) for tool in tools if (name := function_of(tool).get("name"))]
    complete, written = found.end() < len(text), found[1]
    return written in known if complete else any(name.startswith(written) for name in known)


def _emit_text(
    reader: TextReader, marker: str, emit: Emit, start: int, failure: NotACall
) -> Reading[None]:
    size = reader.position - start if failure.whole else len(marker)
    reader.rewind(start)
    emit(reader.skip(size))
    if failure.then is not None:
        yield from failure.then(reader, emit)


def _show_malformed(
    reader: TextReader, parser: ToolParser, marker: str, start: int, failure: NotACall
) -> Reading[None]:
    """Show the text since the last complete call."""
    reader.answer()  # calls end a thought, so that the text is content
    reader.content(reader.between(max(start, reader.calls_end), reader.position))
    if failure.then is not None:
        yield from failure.then(reader, reader.content)
    elif parser.end and not marker.endswith(("[", "{")):
        yield from show_through(*parser.closers())(reader, reader.content)


def _read_empty(reader: TextReader, marker: str, closers: tuple[str, ...]) -> Reading[bool]:
    """Read an empty list of calls: two markers with nothing or `[]` between them, or a marker and
    `[]`. False: there is none here. Without a marker, or in a code fence, `[]` is an answer."""
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
    reader.drop_mark()
    return True


# ---- for the generators of parsers


def read_marked(
    reader: TextReader, openers: tuple[str, ...], end: str, parse: Parse, tools: Tools
) -> Reading[None]:
    """Read one block and report its calls; the reader is at one of `openers`.

    The block ends at the first `end` at which `parse` succeeds, because an argument may contain
    markers; if `end` is empty, it ends with the reply. An opener inside it opens a level, and `end`
    closes one. If the first level is closed and nothing has parsed, `NotACall` is raised: at once
    if it held an opener, else at the next one. Raises `TextEnded` if the reply ends before."""
    yield from reader.accept(*openers)
    text, depth, nested = "", 1, False
    for _ in range(_MOST_MARKERS + 1):
        parts: list[str] = []
        found = yield from reader.pass_until((end, *openers) if end else (), parts.append)
        text += "".join(parts)
        if found and found != end:
            if depth < 1:
                raise NotACall("no call", whole=True)
            depth, nested = depth + 1, True
        elif _report_parsed(reader, found, parse, text, tools):
            return
        elif not found:
            raise TextEnded
        else:
            depth -= 1
        text += reader.skip(len(found))
        if nested and depth < 1:
            raise NotACall("no call", whole=True)
    then = _show_blocks((end,), openers, depth)
    raise NotACall("no call between all these markers", then=then)


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
    """Report a whole call. Raises `TypeError` if its fields are not text (a broken parser)."""
    if not isinstance(call.name, str) or not isinstance(call.arguments, str):
        raise TypeError(f"name and arguments of a call are text, not {call!r}")
    reader.call(call.name)
    reader.arguments(call.arguments)
    reader.end_call()


def claim(reading: Reading[T], then: ShowText | None = None) -> Reading[T]:
    """Run `reading`, whose text can only be a call: if it raises `NotACall`, all of its text is
    shown, and no call is looked for in it. `then`: for a failure without a `then`."""
    try:
        return (yield from reading)
    except NotACall as failure:
        raise NotACall(str(failure), whole=True, then=failure.then or then) from failure


def show_through(*ends: str) -> ShowText:
    """A function that shows the text up to and with the first of `ends`, or to the reply's end."""
    return _show_blocks(ends)


def _show_blocks(ends: tuple[str, ...], openers: tuple[str, ...] = (), depth: int = 1) -> ShowText:
    """Shows the text until `depth` open blocks, and those that open in it, have ended."""

    def show(reader: TextReader, emit: Emit) -> Reading[None]:
        left = depth
        while left > 0 and (found := (yield from reader.pass_until((*ends, *openers), emit))):
            emit(reader.skip(len(found)))
            left += -1 if found in ends else 1

    return show
