"""Predicts the text of tool calls that no grammar restricts (`tool_choice: auto`).

From a call's marker on, the model's tokens pass through the grammar that `tool_choice: required`
would enforce. Where this grammar leaves no choice, the only possible text becomes drafts, which the
model verifies. Models write calls with different white space (`{"a": 1}`, `{"a":1}`). Each such
spelling has its own grammar, compiled when a call first needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...protocol.requests import GenerateRequest
from ...records import ToolParser
from ...records.parsing import CallGrammar
from .request import demanded_names
from .schema import ONE_LINE, Whitespace

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from .compiler import GrammarCompiler

MIN_MARKER = 4  # characters; shorter markers, such as a brace, begin other text more often
MAX_REPLAY = 256  # tokens (about 1 ms); a longer call is not read again in another spelling
SPACED: Whitespace = {**ONE_LINE, "item_separator": ", ", "key_separator": ": "}
COMPACT: Whitespace = {**ONE_LINE, "item_separator": ",", "key_separator": ":"}
SPECIAL = b"\xff"
"""Marks a special token in llguidance's bytes (toktrie 1.9.1, `TokTrie.SPECIAL_TOKEN_MARKER`)."""
PLACEHOLDERS = ("{name}", "{digits}", "{id}")  # of `CallGrammar.before`

Spelling = tuple[CallGrammar, Whitespace]
"""A call format, and the white space of the JSON in it."""


def call_marker(parser: ToolParser) -> str:
    """The text that shows that a call begins: the parser's opener at the start of its call format;
    if that is too short, the format's text up to the name; empty if that is too short, too."""
    grammar = parser.call_grammar()
    text = grammar.open + grammar.before
    name_at = min((text.find(p) for p in PLACEHOLDERS if p in text), default=len(text))
    fixed = text[:name_at]
    opener = max(filter(fixed.startswith, parser.openers()), key=len, default="")
    return next((marker for marker in (opener, fixed) if len(marker) >= MIN_MARKER), "")


def list_spellings(grammar: CallGrammar, template_spaces: Whitespace) -> list[Spelling]:
    """The spellings to try, in this order: spaced, compact, and the chat template's own one."""
    compact = replace(
        grammar,
        open=_drop_spaces(grammar.open),
        before=_drop_spaces(grammar.before),
        between="," if grammar.between == ", " else grammar.between,
    )
    of_template = [] if template_spaces == ONE_LINE else [(grammar, template_spaces)]
    return [(grammar, SPACED), (compact, COMPACT), *of_template]


def _drop_spaces(text: str) -> str:
    return text.replace('": ', '":').replace('", "', '","')


class CallMatchers:
    """Compiles the grammars of a request's calls, one for each of `spellings`, when first needed.
    `fast`: the tokenizer. `marker`: what `call_marker` returns."""

    def __init__(
        self, compiler: GrammarCompiler, request: GenerateRequest, parser: ToolParser
    ) -> None:
        self.fast = compiler.fast
        self.marker = call_marker(parser)
        unused = ("messages", "prompt", "response_format", "grammar")
        changes: dict[str, Any] = dict.fromkeys(unused)
        if demanded_names(request) is None:
            changes["tool_choice"] = "required"
        self._request = request.model_copy(update=changes)  # without images
        self._compiler = compiler
        self.spellings = list_spellings(parser.call_grammar(), compiler.spaces)
        self._futures: dict[int, Future[LLMatcher | None]] = {}

    def compile(self, spelling: int) -> Future[LLMatcher | None]:
        """The matcher of a spelling (its index), before the call's first token; callers copy it.
        The result is `None` if the calls cannot be enforced. Engine thread only."""
        if spelling not in self._futures:
            grammar, spaces = self.spellings[spelling]
            make = partial(self._compiler.calls, self._request, grammar, spaces)
            self._futures[spelling] = _submit(self._compiler.background, make)
        return self._futures[spelling]


def _submit(
    pool: Executor | None, make: Callable[[], LLMatcher | None]
) -> Future[LLMatcher | None]:
    """Without a pool, run at once."""
    if pool is not None:
        return pool.submit(make)
    done: Future[LLMatcher | None] = Future()
    done.set_result(make())
    return done


class CallPredictor:
    """Predicts the calls of one choice (engine thread). `matchers.marker` must not be empty."""

    def __init__(self, matchers: CallMatchers) -> None:
        self._matchers = matchers
        self._marker = matchers.marker
        self._marker_tokens = len(self._marker.encode()) + 1
        self._tail: list[int] = []  # last tokens outside a call, which may contain the marker
        self._call: list[int] | None = None  # tokens from the marker on; `None`: outside a call
        self._matcher: Any = None  # after `_consumed` tokens of the call; `None`: not compiled yet
        self._consumed = 0
        self._spelling = 0  # the one that fits this call so far; the next call begins with it
        self._spellings_left = 0  # those that may fit this call, `_spelling` included
        self._likely: list[int] | None = None  # what `likely` has returned since the last token

    def likely(self) -> Sequence[int]:
        """Predicted next tokens; empty: nothing is known. The model may join the last one with what
        follows it, and so write another token."""
        if self._likely is None:
            current = self._matcher is not None and self._consumed == len(self._call or ())
            self._likely = self._forced_tokens() if current else []
        return self._likely

    def _forced_tokens(self) -> list[int]:
        tokens: list[int] = list(self._matcher.compute_ff_tokens())
        text = self._matcher.compute_ff_bytes().partition(SPECIAL)[0].decode(errors="ignore")
        token_text = self._decode(tokens)
        further = text.removeprefix(token_text) if text.startswith(token_text) else ""
        return [*tokens, *self._encode(further)] if further else tokens

    def advance(self, token: int) -> None:
        """Take the reply's next token."""
        self._likely = None
        self._tail = [*self._tail, token][-self._marker_tokens :]
        if self._call is not None:
            self._call.append(token)
            self._follow_call()
        if self._call is None:
            self._find_marker()

    def _find_marker(self) -> None:
        text = self._decode(self._tail)
        at = text.rfind(self._marker)
        if at >= 0:
            self._call, self._tail = self._encode(text[at:]), []
            self._spellings_left = len(self._matchers.spellings)
            self._follow_call()

    def _follow_call(self) -> None:
        """Feed the matcher the tokens that it has not consumed. If they do not fit, try the next
        spelling from the marker on. At the call's end, or if no spelling fits, leave the call."""
        call = self._call
        while call is not None and self._spellings_left:
            if self._matcher is None and not self._start_matcher():
                return
            if self._matcher is not None:
                self._consumed += self._matcher.try_consume_tokens(call[self._consumed :])
                fits = self._consumed == len(call) and not self._matcher.is_error()
                if fits and not self._matcher.is_stopped():
                    return
                if fits or len(call) > MAX_REPLAY:
                    break
            self._spellings_left -= 1
            self._spelling = (self._spelling + 1) % len(self._matchers.spellings)
            self._matcher, self._consumed = None, 0
        self._call, self._matcher, self._consumed = None, None, 0

    def _start_matcher(self) -> bool:
        """False: the grammar is not compiled yet. True without a matcher: there is no grammar."""
        future = self._matchers.compile(self._spelling)
        if not future.done() or future.cancelled():
            return False
        matcher = future.result()
        self._matcher = matcher and matcher.deep_copy()
        return True

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._matchers.fast.decode(tokens, skip_special_tokens=False)
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._matchers.fast.encode(text, add_special_tokens=False).ids
        return ids
