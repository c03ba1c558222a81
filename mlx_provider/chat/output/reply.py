"""Turns tokens of one choice into the deltas of its reply, up to a stop string within tokens."""

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from typing import Any, Protocol

from ...protocol.event_queue import compact
from ...protocol.events import Delta, FinishReason, TokenLogprob, ToolCallDelta
from ...records.parsing import ReasoningParser, ToolParser, Tools
from ...records.reading import TextEvent, TextReader, partial_at
from .text import read_reply
from .turn_layout import NO_LAYOUT, AnswerEdge, TurnLayout

log = logging.getLogger(__name__)

_OWN_ID = re.compile(r"[A-Za-z0-9_-]{9,40}")
"""A model's own ids that may reach the client: every API accepts them, and they are hard to guess
(LiteLLM's Responses API bridge looks up calls of all clients by id)."""


class Detokenizes(Protocol):
    """Turns tokens into text. `push` returns the text that a token completes, `finish` the rest.
    `pending`: whether the last token has begun a character."""

    @property
    def pending(self) -> bool: ...
    def push(self, token: int) -> str: ...
    def finish(self) -> str: ...


def call_id(number: int) -> str:
    """The default ids of calls."""
    return f"call_{number}"


class Reply:
    """One choice: takes tokens (or text), and returns deltas. They do not depend on token borders,
    because text that may belong to a marker or a stop string is held back until this is known. Stop
    strings apply to the content alone, without the white space that a template writes around it."""

    def __init__(
        self,
        detokenizer: Detokenizes | None = None,
        *,
        stops: Sequence[str] = (),
        tools: Tools = (),
        tool_parser: ToolParser | None = None,
        reasoning_parser: ReasoningParser | None = None,
        reasoning_open: bool | None = False,
        parallel: bool = True,
        index: int = 0,
        ids: Callable[[int], str] = call_id,
        used_ids: Iterable[str] = (),
        layout: TurnLayout = NO_LAYOUT,
    ) -> None:
        """`reasoning_open`: whether the prompt ends in a thought; `None`: unknown. `parallel`: more
        than one call may be reported. `ids`: (number of a call) -> its id, if the model wrote none.
        `used_ids`: of earlier calls. `layout`: white space that the template writes."""
        self._detokenizer = detokenizer
        self._index, self._ids, self._parallel = index, ids, parallel
        self._used_ids = set(used_ids)
        self._reader = TextReader()
        self._stops = StopText(stops)
        # holds back the white space that may stand before a call
        self._edge = AnswerEdge(layout.before_call) if tool_parser is not None else None
        self._reading = read_reply(
            self._reader, self._note, reasoning_parser, tool_parser, tools, reasoning_open, layout
        )
        self.faults: list[str] = []
        """Failures of the parsers; the text concerned is sent as text."""
        self._new_deltas: list[Delta] = []
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()
        self._received = 0  # characters of text
        self._after_stop = 0  # characters of content after a stop string, and of the string itself
        self._calls_begun = 0
        self.complete_calls = 0
        self._ended = False
        self.stopped = ""  # the stop string that was found
        self.in_reasoning = False  # whether the next token belongs to a thought, as far as is known
        self.reasoning_tokens = 0
        self._advance()

    def _note(self, fault: str, trace: str) -> None:
        if not self.faults:
            log.warning("%s: the text is passed on as it is\n%s", fault, trace)
        self.faults.append(fault)

    def push(self, token: int, logprob: TokenLogprob | None = None) -> list[Delta]:
        """Take a token. Returns what can be sent; nothing after a stop string or `finish`."""
        if self.stopped or self._ended:
            return []
        if self._detokenizer is None:
            raise TypeError("a reply without a detokenizer takes text, not tokens")
        text = self._detokenizer.push(token)
        if logprob is not None:
            unfinished = 1 if self._detokenizer.pending else 0  # a character ends in a later token
            self._logprobs.append((self._received + len(text) + unfinished, logprob))
        before = self.in_reasoning
        deltas = self.push_text(text)
        if before or self.in_reasoning:
            self.reasoning_tokens += 1
        return deltas

    def push_text(self, text: str) -> list[Delta]:
        """Like `push`, with text instead of a token; for parser tests and the command line."""
        if self.stopped or self._ended:
            return []
        self._feed(text)
        return self._deltas()

    def finish(self, reason: FinishReason) -> tuple[list[Delta], FinishReason]:
        """Returns the last deltas and the final reason. A stop string turns `length` into `stop`,
        and complete calls turn `stop` into `tool_calls`. Other reasons stay."""
        if not self._ended:
            self._ended = True
            if not self.stopped:
                if self._detokenizer is not None:
                    self._feed(self._detokenizer.finish())
                self._reader.close()
                self._advance()
                if self._edge is not None:
                    self._push_content(self._edge.finish())
                self._flush()
            if self.stopped and reason == "length":
                reason = "stop"
        deltas = self._deltas(last=True)
        return deltas, "tool_calls" if reason == "stop" and self.complete_calls else reason

    def _feed(self, text: str) -> None:
        if text:
            self._received += len(text)
            self._reader.feed(text)
            self._advance()

    def _advance(self) -> None:
        next(self._reading, None)
        for event in self._reader.take_events():
            if not self.stopped:
                self._take(event)

    def _take(self, event: TextEvent) -> None:
        match event.kind:
            case "content":
                text = event.text if self._edge is None else self._edge.push(event.text)
                self._push_content(text)
            case "reasoning":
                self._flush()
                self._new_deltas.append(Delta(index=self._index, reasoning=event.text))
            case "reason" | "answer":
                self.in_reasoning = event.kind == "reason"
            case "call" | "arguments" | "close":
                self.in_reasoning = False
                if event.kind == "call" and self._edge is not None:
                    self._push_content(self._edge.call())
                self._flush()
                if not self.stopped:
                    self._take_call(event)

    def _take_call(self, event: TextEvent) -> None:
        if event.kind == "call":
            self._calls_begun += 1
        if self._calls_begun > 1 and not self._parallel:
            return
        number = self._calls_begun - 1
        if event.kind == "close":
            self.complete_calls += 1
            return
        if event.kind == "call":
            new_id = self._choose_id(number, event.id)
            piece = ToolCallDelta(index=number, id=new_id, name=event.text)
        else:
            piece = ToolCallDelta(index=number, arguments=event.text)
        self._new_deltas.append(Delta(index=self._index, tool_calls=[piece]))

    def _choose_id(self, number: int, written: str) -> str:
        """The id that the model wrote, so that the next prompt repeats it; else a new one."""
        usable = [written] if _OWN_ID.fullmatch(written) else []
        ids = chain(usable, map(self._ids, count(number)))
        chosen = next(x for x in ids if x not in self._used_ids)
        self._used_ids.add(chosen)
        return chosen

    def _flush(self) -> None:
        self._add_content(self._stops.flush())

    def _push_content(self, text: str) -> None:
        before = self._stops.waiting
        passed = self._stops.push(text)
        self._add_content(passed)
        if self._stops.matched and not self.stopped:
            self.stopped = self._stops.matched
            self._after_stop = before + len(text) - len(passed)

    def _add_content(self, text: str) -> None:
        if text:
            self._new_deltas.append(Delta(index=self._index, content=text))

    def _deltas(self, last: bool = False) -> list[Delta]:
        found: list[Any] = compact(self._new_deltas)
        self._new_deltas = []
        logprobs = self._known_logprobs(last) if found or last else []
        if not logprobs:
            return found
        *before, end = found or [Delta(index=self._index)]
        return [*before, end.model_copy(update={"logprobs": logprobs})]

    def _known_logprobs(self, last: bool) -> list[TokenLogprob]:
        """Log-probabilities of tokens whose text has been sent: the text that was read, less what
        `_stops` and `_edge` hold back, less the text from a stop string on. At the end, all."""
        limit = self._received + 1
        if self.stopped or not last:
            edge = self._edge.waiting if self._edge is not None else 0
            limit = self._reader.position - self._stops.waiting - edge - self._after_stop
        found: list[TokenLogprob] = []
        while self._logprobs and self._logprobs[0][0] <= limit:
            found.append(self._logprobs.popleft()[1])
        return found


class StopText:
    """Passes text on up to the first stop string (then `matched`); holds back a possible beginning
    of one. The stop string that completes first wins, as if text came character by character."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_Stop(x) for x in stops if x]
        self._pending = ""
        self.matched = ""

    def push(self, text: str) -> str:
        """Take text; returns what is certainly before a stop string."""
        if not self._stops:
            return text
        if self.matched:
            return ""
        found = [(end, -len(x.text), x.text) for x in self._stops if (end := x.feed(text))]
        before, text = len(self._pending), self._pending + text
        if found:
            end, _, self.matched = min(found)
            self._pending = ""
            return text[: before + end - len(self.matched)]
        at = len(text) - max(x.begun for x in self._stops)
        self._pending = text[at:]
        return text[:at]

    def flush(self) -> str:
        """Return what is held back, because no stop string extends beyond it."""
        pending, self._pending = self._pending, ""
        for stop in self._stops:
            stop.begun = 0
        return pending

    @property
    def waiting(self) -> int:
        """Characters that are held back."""
        return len(self._pending)


class _Stop:
    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0  # characters of it at the end of the text so far

    def feed(self, text: str) -> int:
        """Characters of `text` that complete the stop string; 0: incomplete."""
        text = self.text[: self.begun] + text
        if (at := text.find(self.text)) >= 0:
            return at + len(self.text) - self.begun
        self.begun = len(text) - partial_at(text, (self.text,))
        return 0
