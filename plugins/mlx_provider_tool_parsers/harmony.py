"""Harmony (gpt-oss): every message has a channel, and calls a recipient."""

import re
from dataclasses import dataclass

from mlx_provider import CallGrammar, MessageGrammar, ReasoningParser, ToolParser
from mlx_provider.records import Emit, NotACall, Reading, TextEnded, TextReader, Tools

from .json_text import identity, ignore, read_call
from .values import closes

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
_ENDS = (END, CALL, RETURN)
MARKERS = (START, CHANNEL, MESSAGE, *_ENDS, CONSTRAIN)

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)|^\s*(analysis|commentary|final)\b")
_NAME = re.compile(r"[\w.:/-]*")
_CUT_HEADER = re.compile(r"\s*(?:assistant\b)?\s*(?:to?|to=[\w.:/-]*)?\s*")
_RECIPIENT = re.compile(r"\bto=([\w.:/-]+)")


@dataclass
class Edges:
    """Leaves out white space at both edges of a text."""

    emit: Emit
    begun: bool = False
    space: str = ""

    def piece(self, text: str) -> None:
        if not self.begun:
            text = text.lstrip()
            self.begun = bool(text)
        text = self.space + text
        known = text.rstrip()
        self.space = text[len(known) :]
        if known:
            self.emit(known)


def read_harmony(reader: TextReader, tools: Tools | None) -> Reading[None]:
    """Without tools, messages to a tool are content. The prompt can contain the beginning of the
    first header."""
    if (yield from _in_header(reader)):
        yield from _message(reader, tools)
    while True:
        space = yield from reader.space()
        found = yield from reader.at(*MARKERS)
        if found in _ENDS:
            reader.skip(len(found))
        elif found:
            yield from _message(reader, tools)
        elif (yield from reader.peek()):
            reader.content(space)
            yield from reader.pass_until(MARKERS, reader.content)
        else:
            reader.content(space if reader.position == len(space) else "")  # all of the reply
            return


def _in_header(reader: TextReader) -> Reading[bool]:
    """A header begins with its role, channel or recipient."""
    mark = reader.mark()
    yield from reader.space()
    start = reader.position
    yield from reader.accept("assistant")
    yield from reader.space()
    yield from reader.accept("analysis", "commentary", "final")
    yield from reader.space()
    addressed = yield from reader.accept("to=")
    if addressed:
        yield from reader.run(_NAME)
        yield from reader.space()
    found = reader.position > start and (yield from reader.at(CHANNEL, MESSAGE, CONSTRAIN))
    cut = bool(addressed) and not (yield from reader.peek())
    reader.rewind(mark)
    return bool(found or cut)


def _message(reader: TextReader, tools: Tools | None) -> Reading[None]:
    header: list[str] = []
    while True:
        found = yield from reader.pass_until((MESSAGE, *_ENDS, START), header.append)
        if found != START:
            break
        header = []
        reader.skip(len(found))
    reader.skip(len(found))
    text = "".join(header)
    if found != MESSAGE:
        if CHANNEL not in text and (found or not _CUT_HEADER.fullmatch(text)):
            reader.content(text.strip())
        return
    channel = _CHANNEL.search(text)
    recipient = _RECIPIENT.search(text)
    name = (channel[1] or channel[2]) if channel else "final"
    if recipient is not None and tools is not None and recipient[1] != "user":
        yield from _call(reader, recipient[1].removeprefix("functions."))
    elif name == "analysis" and recipient is None:
        reader.reason()
        yield from _body(reader, Edges(reader.reasoning).piece, thoughts=True)
        reader.answer()
    else:
        yield from _body(reader, Edges(reader.content).piece, thoughts=False)


def _body(reader: TextReader, emit: Emit, *, thoughts: bool) -> Reading[None]:
    """An end marker inside an answer is text if text follows."""
    while True:
        found = yield from reader.pass_until((*_ENDS, START, CHANNEL), emit)
        if found in ("", START, CHANNEL):
            return
        if thoughts or found != END:
            reader.skip(len(found))
            return
        if (yield from closes(reader, found, *MARKERS)):
            return
        emit(reader.skip(len(found)))


def _call(reader: TextReader, name: str) -> Reading[None]:
    """A message to a tool that is not a call is text, with headers if the call has begun."""
    mark, before = reader.mark(), reader.calls_begun
    try:
        yield from read_call(reader, name)
    except NotACall:
        reader.rewind(mark)
        reader.forget_marks()
        show = Edges(reader.content).piece
        if reader.calls_begun == before:
            yield from _body(reader, show, thoughts=False)
        else:
            reader.skip(len((yield from reader.pass_until(_ENDS, show))))
    except TextEnded:  # the call stays unfinished
        pass
    else:
        reader.drop_mark()
        found = yield from reader.pass_until((*_ENDS, START, CHANNEL), ignore)
        reader.skip(len(found) if found in _ENDS else 0)


MARKS = (CHANNEL, "analysis")
NAMES = "gpt-oss gpt_oss openai"
PARSERS = (
    ToolParser(
        start="",
        end=CALL,
        whole=read_harmony,
        markers=MARKERS,
        grammar=CallGrammar(
            f"{CHANNEL}commentary to=functions.{{name}} {CONSTRAIN}json{MESSAGE}", "", between=None
        ),
        **identity("harmony", MARKS, aliases=NAMES, rank=3),
    ),
)
REASONING_PARSERS = (
    ReasoningParser(
        start="",
        end="",
        whole=read_harmony,
        markers=MARKERS,
        grammar=MessageGrammar(
            f"{CHANNEL}analysis{MESSAGE}", END, f"{START}assistant", f"{CHANNEL}final{MESSAGE}"
        ),
        **identity("harmony", MARKS, aliases=f"{NAMES} openai_gptoss", rank=3),
    ),
)
