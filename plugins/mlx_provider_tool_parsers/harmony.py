"""Harmony (gpt-oss): each message has a header with its channel and, for a call, the tool's name.

<|start|>assistant<|channel|>analysis<|message|>THOUGHT<|end|>
<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>"""

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
"""A header without a channel that the end of the reply cuts."""
_RECIPIENT = re.compile(r"\bto=([\w.:/-]+)")


@dataclass
class StrippedText:
    """Emits a text piece by piece without the white space at its beginning and end."""

    emit: Emit
    begun: bool = False
    space: str = ""

    def add(self, piece: str) -> None:
        text = self.space + piece if self.begun else piece.lstrip()
        found = text.rstrip()
        self.space = text[len(found) :]
        if found:
            self.begun = True
            self.emit(found)


def read_harmony(reader: TextReader, tools: Tools | None) -> Reading[None]:
    """Read a whole reply: report its thoughts, content and calls. If `tools` is `None`, messages to
    a tool are content. Text outside of messages is content, too."""
    if (yield from _begins_in_header(reader)):
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
            # white space is content if it is the whole reply
            reader.content(space if reader.position == len(space) else "")
            return


def _begins_in_header(reader: TextReader) -> Reading[bool]:
    """Whether the reply begins with the rest of a header that began in the prompt: a role, a
    channel or a recipient, and then a marker or the end of the reply. Reads nothing."""
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
    marker = reader.position > start and (yield from reader.at(CHANNEL, MESSAGE, CONSTRAIN))
    ended = bool(addressed) and not (yield from reader.peek())
    reader.rewind(mark)
    return bool(marker or ended)


def _message(reader: TextReader, tools: Tools | None) -> Reading[None]:
    """Read a header and its message. Of several headers in a row, only the last one counts."""
    found = START
    while found == START:
        header: list[str] = []
        found = yield from reader.pass_until((MESSAGE, *_ENDS, START), header.append)
        reader.skip(len(found))
    text = "".join(header)
    if found != MESSAGE:  # no message follows: the text is content, unless it is a header
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
        yield from _body(reader, StrippedText(reader.reasoning).add, thoughts=True)
        reader.answer()
    else:
        yield from _body(reader, StrippedText(reader.content).add, thoughts=False)


def _body(reader: TextReader, emit: Emit, *, thoughts: bool) -> Reading[None]:
    """Read to the next message. An `END` inside an answer is text if text follows it."""
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
    """Read a message to the tool `name`. A message that is no call is content. If the call has been
    reported already, everything up to an end marker is content, with headers."""
    mark, before = reader.mark(), reader.calls_begun
    try:
        yield from read_call(reader, name)
    except NotACall:
        reader.rewind(mark)
        reader.forget_marks()
        show = StrippedText(reader.content).add
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


IN_TEMPLATES = (CHANNEL, "analysis")
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
        **identity("harmony", IN_TEMPLATES, aliases=NAMES, rank=3),
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
        **identity("harmony", IN_TEMPLATES, aliases=f"{NAMES} openai_gptoss", rank=3),
    ),
)
