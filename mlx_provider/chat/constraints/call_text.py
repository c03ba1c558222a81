"""Predicts the text of tool calls that no grammar restricts (`tool_choice: auto`). From a call's
marker on, the grammar that `required` would enforce reads the model's tokens; the text that it
forces becomes drafts, which the model verifies. Nothing is compiled before the first marker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...isolation import Isolation
from ...protocol.requests import GenerateRequest
from ...records import ToolParser
from ...records.parsing import CallGrammar
from .request import demanded_names
from .schema import ONE_LINE, Whitespace

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from .compiler import GrammarCompiler

LEAST_MARKER = 4
"""Shorter markers, such as a brace, begin other text more often."""
REPLAYED = 256
"""Most tokens of a call that the grammar of another spelling reads again (below 1 ms)."""
SPACED: Whitespace = {**ONE_LINE, "item_separator": ", ", "key_separator": ": "}
COMPACT: Whitespace = {**ONE_LINE, "item_separator": ",", "key_separator": ":"}
_SPECIAL = b"\xff"
"""Marks a special token in llguidance's bytes (toktrie 1.9.1, `TokTrie.SPECIAL_TOKEN_MARKER`)."""
_FIELDS = ("{name}", "{digits}", "{id}")

Spelling = tuple[CallGrammar, Whitespace]


def call_marker(parser: ToolParser) -> str:
    """The opener with which the grammar's text begins, or the grammar's text up to the name."""
    grammar = parser.call_grammar()
    text = grammar.open + grammar.before
    fixed = text[: min((text.find(place) for place in _FIELDS if place in text), default=len(text))]
    openers = [each for each in parser.openers() if fixed.startswith(each)]
    marker = max(openers, key=len, default="")
    found = marker if len(marker) >= LEAST_MARKER else fixed
    return found if len(found) >= LEAST_MARKER else ""


def spellings(grammar: CallGrammar, spaces: Whitespace) -> list[Spelling]:
    compact = replace(
        grammar,
        open=_drop_spaces(grammar.open),
        before=_drop_spaces(grammar.before),
        between="," if grammar.between == ", " else grammar.between,
    )
    own = [] if spaces == ONE_LINE else [(grammar, spaces)]
    return [(grammar, SPACED), (compact, COMPACT), *own]


def _drop_spaces(text: str) -> str:
    return text.replace('": ', '":').replace('", "', '","')


class CallMatchers:
    """Compiles the grammars of a request's calls, one for each spelling, when first needed."""

    def __init__(
        self, compiler: GrammarCompiler, request: GenerateRequest, parser: ToolParser
    ) -> None:
        self.fast = compiler.fast
        self.marker = call_marker(parser)
        self._request = GenerateRequest.model_construct(  # without messages, which hold images
            model=request.model,
            tools=request.tools,
            tool_choice="required" if demanded_names(request) is None else request.tool_choice,
            parallel_tool_calls=request.parallel_tool_calls,
        )
        self._compiler = compiler
        self._spellings = spellings(parser.call_grammar(), compiler.spaces)
        self._futures: dict[int, Future[LLMatcher | None]] = {}

    def __len__(self) -> int:
        return len(self._spellings)

    def matcher(self, number: int) -> Future[LLMatcher | None]:
        """A matcher at the beginning of the calls in one spelling, to copy (engine thread). `None`:
        these tools have none."""
        if number not in self._futures:
            grammar, spaces = self._spellings[number]
            make = partial(self._compiler.calls, self._request, grammar, spaces)
            self._futures[number] = _begin(self._compiler.background, make)
        return self._futures[number]


def _begin(pool: Executor | None, make: Callable[[], LLMatcher | None]) -> Future[LLMatcher | None]:
    if pool is not None:
        return pool.submit(make)
    done: Future[LLMatcher | None] = Future()
    done.set_result(make())
    return done


class CallPredictor:
    """Predicts the calls of one choice. Belongs to the engine thread."""

    def __init__(self, matchers: CallMatchers) -> None:
        self._matchers = matchers
        self._marker = matchers.marker
        self._marker_tokens = len(self._marker.encode()) + 1
        self._tail: list[int] = []
        self._call: list[int] | None = None
        """Tokens from the marker on. `None`: outside a call."""
        self._matcher: Any = None
        """State after `_consumed` tokens of the call. `None`: not compiled yet."""
        self._consumed = 0
        self._spelling = 0
        self._untried = 0  # spellings
        self._likely: list[int] | None = None

    def likely(self) -> Sequence[int]:
        """Guessed tokens. The model may write the last one joined with its successor."""
        if self._likely is None:
            current = self._matcher is not None and self._consumed == len(self._call or ())
            self._likely = self._forced_tokens() if current else []
        return self._likely

    def _forced_tokens(self) -> list[int]:
        sure: list[int] = list(self._matcher.compute_ff_tokens())
        text = self._matcher.compute_ff_bytes().partition(_SPECIAL)[0].decode(errors="ignore")
        shown = self._decode(sure)
        open_end = text[len(shown) :] if text.startswith(shown) else ""
        return [*sure, *self._encode(open_end)] if open_end else sure

    def advance(self, token: int) -> None:
        self._likely = None
        self._tail = [*self._tail, token][-self._marker_tokens :]
        if self._call is not None:
            self._call.append(token)
            self._consume()
        if self._call is None:
            self._find_marker()

    def _find_marker(self) -> None:
        text = self._decode(self._tail)
        at = text.rfind(self._marker)
        if at >= 0:
            self._call, self._untried, self._tail = self._encode(text[at:]), len(self._matchers), []
            self._restart()
            self._consume()

    def _consume(self) -> None:
        call = self._call
        while call is not None and self._untried:
            if self._matcher is None and not self._start_matcher():
                return
            if self._matcher is not None:
                taken = self._matcher.try_consume_tokens(call[self._consumed :])
                self._consumed += taken
                fits = self._consumed == len(call) and not self._matcher.is_error()
                if fits and not self._matcher.is_stopped():
                    return
                if fits or len(call) > REPLAYED:
                    break
            self._untried -= 1
            self._spelling = (self._spelling + 1) % len(self._matchers)
            self._restart()
        self._call = None
        self._restart()

    def _start_matcher(self) -> bool:
        future = self._matchers.matcher(self._spelling)
        if not future.done():
            return False
        with Isolation():
            matcher = future.result()
            self._matcher = matcher and matcher.deep_copy()
        return True

    def _restart(self) -> None:
        self._matcher, self._consumed = None, 0

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._matchers.fast.decode(tokens, skip_special_tokens=False)
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._matchers.fast.encode(text, add_special_tokens=False).ids
        return ids
