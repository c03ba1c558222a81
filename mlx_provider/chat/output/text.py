"""Splits the text of one reply into thoughts, answer and tool calls, and reports them as events of
a `TextReader`: its `reason()` and `answer()` report that thoughts or the answer begin."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ...isolation import attempt_generator
from ...records.blocks import read_block, scan_block
from ...records.parsing import ReasoningParser, ToolParser, Tools, Whole
from ...records.reading import Emit, NotACall, Reading, TextEnded, TextReader, read_turn_ends
from .turn_layout import TurnLayout, after_joint, before_joint

Note = Callable[[str, str], None]  # takes one line about a failed parser, and the traceback


def read_reply(
    reader: TextReader,
    note: Note,
    reasoning_parser: ReasoningParser | None,
    tool_parser: ToolParser | None,
    tools: Tools,
    thought_is_open: bool | None,
    layout: TurnLayout,
) -> Reading[None]:
    """Read a whole reply. Results are events of `reader`. `thought_is_open`: whether the prompt
    ends in a thought; `None`: unknown. `layout`: white space that is no text."""
    for kind, parser in (("reasoning", reasoning_parser), ("tool", tool_parser)):
        if parser is not None and parser.whole is not None:
            name = f"{kind} parser {parser.name!r}"
            return _read_whole(parser.whole, name, reader, tools if tool_parser else None, note)
    thoughts = reasoning_parser or ReasoningParser(name="", start="", end="")
    calls = tool_parser or ToolParser(name="", start="", end="")
    breaks = {} if tool_parser else dict(thoughts.calls)
    return _MarkedReply(reader, note, thoughts, calls, breaks, tools, layout).run(thought_is_open)


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
    """Reads a reply in which markers separate thoughts, answer and calls. White space between these
    parts is text, without what the chat template writes there itself (`layout`). Where that is
    unknown, all of it is dropped, after a thought up to the last line end."""

    reader: TextReader
    note: Note
    reasoning_parser: ReasoningParser
    """It has `hidden` markers, the word after an opener (`header`), and `unmarked` text's kind."""
    tool_parser: ToolParser
    """Markers in `first` open a call only where the reply or the answer begins."""
    thought_breaks: Mapping[str, str]
    """Openers of calls that end a thought although no parser reads the calls, with the characters
    that must follow; empty: any."""
    tools: Tools
    layout: TurnLayout
    pending_space: str = ""  # white space that is text only if more text of its kind follows
    pending_closers: int = 0
    """Closers still expected after a thought, which are dropped: one for each opener inside it, and
    one if a call ended it."""
    dropping: bool = False  # whether text after a call is discarded

    def __post_init__(self) -> None:
        self.openers = self.reasoning_parser.openers()
        self.closers = self.reasoning_parser.closers()
        self.call_openers = self.tool_parser.openers()

    def add_content(self, text: str) -> None:
        if text and not self.dropping:
            self.reader.content(self.pending_space + text)
            self.pending_space = ""

    def add_thought(self, text: str) -> None:
        text = self.pending_space + text
        thought = text.rstrip()
        self.pending_space = text[len(thought) :]
        self.reader.reasoning(thought)

    def run(self, thought_is_open: bool | None) -> Reading[None]:
        reader, unmarked = self.reader, self.reasoning_parser.unmarked
        reader.content(self.reasoning_parser.prefix)
        if thought_is_open is None and unmarked != "wait":
            thought_is_open = unmarked == "reasoning"
        if thought_is_open and self.closers:
            yield from self.read_thought()
        else:
            space = yield from reader.space()
            self.pending_space = space.removeprefix(self.layout.turn_open or "")
            if not (yield from reader.peek()):
                reader.content(self.pending_space)
            called = yield from self.read_first_calls()
            if thought_is_open is None and self.closers and not called:
                yield from self.read_undecided()
        while (yield from self.read_to_next_marker()):
            pass

    def read_undecided(self) -> Reading[None]:
        """The text up to the first marker, which decides whether it is a thought."""
        reader, parser = self.reader, self.reasoning_parser
        parts: list[str] = []
        call_openers = (*self.call_openers, *self.thought_breaks)
        markers = (*self.openers, *self.closers, *parser.hidden, *call_openers)
        found = yield from reader.pass_until(markers, parts.append)
        text = "".join(parts)
        called = text and found in call_openers and parser.unmarked_call == "reasoning"
        if not called and found not in self.closers:
            self.add_content(text)
            return
        self.pending_space = ""
        reader.reason()
        self.add_thought(text.removeprefix(parser.header + "\n").lstrip())
        if found in self.closers:
            reader.skip(len(found))
        yield from self.end_thought()

    def read_to_next_marker(self) -> Reading[bool]:
        """Read answer up to a marker, and what the marker opens. False: the reply has ended."""
        reader, hidden = self.reader, self.reasoning_parser.hidden
        markers = (*self.openers, *self.closers, *hidden, *self.call_openers)
        found = yield from reader.pass_until(markers, self.add_content)
        if not found:
            return False
        if found in self.openers:
            reader.skip(len(found))
            yield from self.read_thought()
        elif found in hidden:
            reader.skip(len(found))
        elif found not in self.closers:
            yield from self.read_calls(found, self.add_content)
        elif self.pending_closers:
            self.pending_closers -= 1
            reader.skip(len(found))
            self.pending_space = yield from reader.space()
        else:
            self.add_content(reader.skip(len(found)))
        return True

    def read_thought(self) -> Reading[None]:
        """Read from behind an opener to the end of the thought, or of the call that ends it."""
        reader, header = self.reader, self.reasoning_parser.header
        reader.reason()
        space = yield from reader.space()
        if (yield from reader.accept(*self.openers)):  # a prompt and a model may both write it
            space = ""
        if header:
            yield from reader.accept(header + "\n")
        space += yield from reader.space()
        self.pending_space = after_joint(space, self.layout.thought_open)
        markers = (*self.closers, *self.openers, *self.call_openers, *self.thought_breaks)
        while True:
            found = yield from reader.pass_until(markers, self.add_thought)
            if not found:
                reader.reasoning(self.pending_space)
                return
            if found in self.closers:
                reader.skip(len(found))
                reader.reasoning(before_joint(self.pending_space, self.layout.thought_close))
                yield from self.end_thought()
                return
            if found in self.openers:
                self.pending_closers += 1
                self.add_thought(reader.skip(len(found)))
            elif found in self.call_openers:
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
        reader, follows = self.reader, self.thought_breaks[marker]
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
        reader, joint = self.reader, self.layout.answer_open
        reader.answer()
        while True:
            space = yield from reader.space()
            if not self.closers or not (yield from reader.accept(*self.closers)):
                break
            self.pending_closers = max(0, self.pending_closers - 1)
        last_line = space[space.rfind("\n") + 1 :]
        self.pending_space = last_line if joint is None else after_joint(space, joint)
        yield from self.read_first_calls()

    def read_first_calls(self) -> Reading[bool]:
        """Read calls with an opener that counts only here. False: there are none."""
        if not self.tool_parser.first:
            return False
        found = yield from self.reader.at(*self.tool_parser.first)
        return bool(found) and (yield from self.read_calls(found, self.add_content))

    def read_calls(self, marker: str, emit: Emit) -> Reading[bool]:
        """Read the block that `marker` opens. False: it was text, which went to `emit`."""
        reader, parser = self.reader, self.tool_parser
        start, before = reader.position, reader.calls_begun
        is_block = yield from read_block(reader, self.scan(), parser, marker, emit, self.tools)
        reader.forget_marks()
        if not is_block:
            return False
        reader.answer()
        self.dropping = parser.after == "drop" and reader.calls_end > start
        if reader.calls_begun > before:
            ends, markers = parser.turn_ends, parser.visible()
            self.pending_space = yield from read_turn_ends(reader, ends, self.call_openers, markers)
        else:
            self.pending_space = yield from reader.space()
        return True

    def scan(self) -> Reading[None]:
        """Read a block. If the parser fails, only its calls are lost, and its text is shown."""
        parser = self.tool_parser
        scan = partial(scan_block, parser, self.reader, self.tools)
        fault = yield from attempt_generator(scan, NotACall, TextEnded)
        if fault is not None:
            self.note(f"tool parser {parser.name!r} failed: {fault.summary}", fault.trace)
            raise NotACall(fault.summary)
