"""Splits the text of one reply into thoughts, answer and tool calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ...isolation import attempt_generator
from ...records.blocks import read_block, scan_block
from ...records.parsing import ReasoningParser, ToolParser, Tools, Whole
from ...records.reading import Emit, NotACall, Reading, TextEnded, TextReader, read_turn_ends
from .turn_layout import TurnLayout, after_joint, before_joint

Note = Callable[[str, str], None]
"""Receives one line about a failed parser, and the traceback."""


def read_reply(
    reader: TextReader,
    note: Note,
    thoughts: ReasoningParser | None,
    calls: ToolParser | None,
    tools: Tools,
    is_open: bool | None,
    layout: TurnLayout,
) -> Reading[None]:
    """Read a whole reply. `is_open`: whether the prompt ended inside a thought; `None`: unknown."""
    for kind, parser in (("reasoning", thoughts), ("tool", calls)):
        if parser is not None and parser.whole is not None:
            name = f"{kind} parser {parser.name!r}"
            return _read_whole(parser.whole, name, reader, tools if calls else None, note)
    thoughts = thoughts or ReasoningParser(name="", start="", end="", calls=())
    parser = calls or ToolParser(name="", start="", end="")
    breaks = {} if calls else dict(thoughts.calls)
    return _MarkedReply(reader, note, thoughts, parser, breaks, tools, layout).run(is_open)


def _read_whole(
    read: Whole, parser: str, reader: TextReader, tools: Tools | None, note: Note
) -> Reading[None]:
    """Run a parser of whole replies. Text that it leaves unread after a failure is content."""
    fault = yield from attempt_generator(partial(read, reader, tools))
    if fault is None:
        return
    note(f"{parser} failed: {fault.summary}", fault.trace)
    reader.give_up()
    reader.answer()
    yield from reader.pass_until((), reader.content)


@dataclass
class _MarkedReply:
    """Reads a reply in which markers separate thoughts, answer and calls."""

    reader: TextReader
    note: Note
    thoughts: ReasoningParser
    parser: ToolParser
    breaks: Mapping[str, str]
    tools: Tools
    layout: TurnLayout
    pending_space: str = ""
    """White space that is text only if more text of its kind follows."""
    pending_closers: int = 0
    """Closers still to come, for openers inside a thought or a call that broke one: no text."""
    dropping: bool = False
    """Whether text after a call is discarded."""

    def __post_init__(self) -> None:
        self.openers = self.thoughts.openers()
        self.closers = self.thoughts.closers()
        self.calls = self.parser.openers()

    def add_content(self, text: str) -> None:
        if text and not self.dropping:
            self.reader.content(self.pending_space + text)
            self.pending_space = ""

    def add_thought(self, text: str) -> None:
        text = self.pending_space + text
        thought = text.rstrip()
        self.pending_space = text[len(thought) :]
        self.reader.reasoning(thought)

    def run(self, is_open: bool | None) -> Reading[None]:
        thoughts = self.thoughts
        self.reader.content(thoughts.prefix)
        if not self.closers or is_open is False:
            yield from self.begin_answer()
        elif is_open or thoughts.unmarked == "reasoning":
            self.reader.reason()
            yield from self.read_thought()
        elif thoughts.unmarked == "content":
            yield from self.begin_answer()
        else:
            yield from self.read_undecided()
        while (yield from self.read_answer()):
            pass

    def begin_answer(self) -> Reading[None]:
        space = yield from self.reader.space()
        self.pending_space = space.removeprefix(self.layout.turn_open or "")
        if not (yield from self.reader.peek()):
            self.reader.content(self.pending_space)
            self.pending_space = ""
        yield from self.try_first()

    def read_undecided(self) -> Reading[None]:
        """The text up to the first marker, which decides whether it is a thought."""
        reader, thoughts = self.reader, self.thoughts
        space = yield from reader.space()
        self.pending_space = space.removeprefix(self.layout.turn_open or "")
        if (yield from self.try_first()):
            return
        parts: list[str] = []
        markers = (*self.openers, *self.closers, *self.thoughts.hidden, *self.calls, *self.breaks)
        found = yield from reader.pass_until(markers, parts.append)
        text = "".join(parts)
        called = found in self.calls or found in self.breaks
        if found in self.closers or (called and thoughts.unmarked_call == "reasoning" and text):
            self.pending_space = ""
            reader.reason()
            if thoughts.header:
                text = text.removeprefix(thoughts.header + "\n")
            self.add_thought(text.lstrip())
            if found in self.closers:
                reader.skip(len(found))
            yield from self.end_thought()
        elif text:
            self.add_content(text)
        elif not found:
            reader.content(self.pending_space)
            self.pending_space = ""

    def read_answer(self) -> Reading[bool]:
        """Up to and with the next marker. False: the reply has ended."""
        reader = self.reader
        markers = (*self.openers, *self.closers, *self.thoughts.hidden, *self.calls)
        found = yield from reader.pass_until(markers, self.add_content)
        if not found:
            return False
        if found in self.openers:
            reader.skip(len(found))
            reader.reason()
            self.pending_space = ""
            yield from self.read_thought()
        elif found in self.thoughts.hidden:
            reader.skip(len(found))
        elif found in self.closers:
            if self.pending_closers:
                self.pending_closers -= 1
                reader.skip(len(found))
                self.pending_space = ""
                self.pending_space = yield from reader.space()
            else:
                self.add_content(reader.skip(len(found)))
        else:
            yield from self.read_calls(found, self.add_content)
        return True

    def read_thought(self) -> Reading[None]:
        reader, thoughts = self.reader, self.thoughts
        space = yield from reader.space()
        if (yield from reader.accept(*self.openers)):
            space = ""
        if thoughts.header:
            yield from reader.accept(thoughts.header + "\n")
        space += yield from reader.space()
        self.pending_space = after_joint(space, self.layout.thought_open)
        markers = (*self.closers, *self.openers, *self.calls, *self.breaks)
        while True:
            found = yield from reader.pass_until(markers, self.add_thought)
            if not found:
                reader.reasoning(self.pending_space)
                self.pending_space = ""
                return
            if found in self.closers:
                reader.skip(len(found))
                reader.reasoning(before_joint(self.pending_space, self.layout.thought_close))
                yield from self.end_thought()
                return
            if found in self.openers:
                self.pending_closers += 1
                self.add_thought(reader.skip(len(found)))
            elif found in self.calls:
                if (yield from self.read_calls(found, self.add_thought)):
                    self.pending_closers += 1
                    return
            elif (yield from self.breaks_thought(found)):
                self.pending_closers += 1
                yield from self.end_thought()
                return
            else:
                self.add_thought(reader.skip(len(found)))

    def breaks_thought(self, marker: str) -> Reading[bool]:
        """Whether `marker` opens a call here; runs no parser."""
        reader, follows = self.reader, self.breaks[marker]
        if not follows:
            return True
        mark = reader.mark()
        reader.skip(len(marker))
        yield from reader.space()
        following = yield from reader.peek()
        reader.rewind(mark)
        return bool(following) and following in follows

    def end_thought(self) -> Reading[None]:
        """Skip repeated closers and the line ends before the answer."""
        reader = self.reader
        reader.answer()
        self.pending_space = ""
        while True:
            space = yield from reader.space()
            if not self.closers or not (yield from reader.accept(*self.closers)):
                break
            self.pending_closers = max(0, self.pending_closers - 1)
        joint = self.layout.answer_open
        beyond = space[space.rfind("\n") + 1 :]
        self.pending_space = beyond if joint is None else after_joint(space, joint)
        yield from self.try_first()

    def try_first(self) -> Reading[bool]:
        if not self.parser.first:
            return False
        found = yield from self.reader.at(*self.parser.first)
        return bool(found) and (yield from self.read_calls(found, self.add_content))

    def read_calls(self, marker: str, emit: Emit) -> Reading[bool]:
        """False: it was text, which went to `emit`."""
        reader, parser = self.reader, self.parser
        start, before = reader.position, reader.calls_begun
        if not (yield from read_block(reader, self.scan(), parser, marker, emit, self.tools)):
            reader.forget_marks()
            return False
        reader.forget_marks()
        reader.answer()
        self.dropping = parser.after == "drop" and reader.calls_end > start
        self.pending_space = ""
        if reader.calls_begun > before:
            ends, markers = parser.turn_ends, parser.visible()
            self.pending_space = yield from read_turn_ends(reader, ends, self.calls, markers)
        else:
            self.pending_space = yield from reader.space()
        return True

    def scan(self) -> Reading[None]:
        """If the parser fails, only this call is lost, and its text is shown."""
        scan = partial(scan_block, self.parser, self.reader, self.tools)
        fault = yield from attempt_generator(scan, NotACall, TextEnded)
        if fault is not None:
            self.note(f"tool parser {self.parser.name!r} failed: {fault.summary}", fault.trace)
            raise NotACall(fault.summary)
