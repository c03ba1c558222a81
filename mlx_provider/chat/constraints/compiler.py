"""Structured output: grammars compiled by llguidance and enforced token by token with bit masks."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import BadRequest, GrammarFailed, RequestFailed
from ...protocol.requests import GenerateRequest
from ...records.parsing import CallGrammar, MessageGrammar
from .request import GrammarForm, after_message, request_form
from .schema import ONE_LINE, Whitespace
from .trial import LIMITS, MAX_GRAMMAR, Allowance, GrammarTrial
from .vocabulary import grammar_tokenizer, is_marker

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = NDArray[np.uint32]
"""Bit `i % 32` of word `i // 32`: whether token `i` is allowed. Shape (ceil(vocab / 32),)."""
MASK_SECONDS = 30  # limit for one mask (usually milliseconds), which protects other requests
KEPT_LETTERS = 2 * MAX_GRAMMAR  # characters of all cached grammars, at about twenty bytes each
_EMPTY = ("NoExtension", "NoExtensionBias")  # llguidance's errors if no text fits a grammar


@dataclass(eq=False)
class Constraint:
    """The grammar of one choice, at the reply's last token. Used by one thread at a time, except
    that `_pool` computes the next mask during the device's pass. `finished`: only the end may
    follow. Each method raises `GrammarFailed` if the grammar fails or needs too much time."""

    _matcher: LLMatcher
    _vocab_size: int
    _eos: frozenset[int]
    _pool: Executor | None = None
    _packed: bytes | None = None
    _ahead: Future[bytes] | None = None

    def __post_init__(self) -> None:
        self.finished = bool(self._matcher.is_stopped())

    def mask(self) -> Mask:
        """The tokens that may follow, as a new array."""
        self._settle()
        if self._packed is None:
            self._packed = self._matcher.compute_bitmask()
        self._check()
        words = np.frombuffer(self._packed, dtype=np.uint32)[: (self._vocab_size + 31) // 32].copy()
        if self._vocab_size % 32:
            words[-1] &= np.uint32((1 << self._vocab_size % 32) - 1)
        return words

    def advance(self, token: int) -> None:
        """Take the reply's next token. Raises `RequestFailed` if it is forbidden."""
        self._settle()
        if token in self._eos and self._matcher.is_accepting():
            return  # the reply ends
        # the mask may not be known yet
        offered = self._packed is None or bool(self._packed[token // 8] >> token % 8 & 1)
        self._matcher.consume_token(token)
        if not offered and self._matcher.is_error():
            raise RequestFailed(self._complaint())
        self._advance()

    def forced_tokens(self) -> list[int]:
        """Next tokens that have no alternative; empty: the grammar leaves a choice."""
        self._settle()
        return [] if self.finished else list(self._matcher.compute_ff_tokens())

    def take_all(self, tokens: Iterable[int]) -> None:
        """Take as many of `tokens` as the grammar allows; ignore the others."""
        self._settle()
        self._matcher.try_consume_tokens(list(tokens))
        self._advance()

    @property
    def complete(self) -> bool:
        """Whether the reply may end here."""
        self._settle()
        return bool(self._matcher.is_accepting())

    def fork(self) -> Constraint:
        """An independent copy in the same state, for another choice."""
        self._settle()
        matcher = self._matcher.deep_copy()
        return Constraint(matcher, self._vocab_size, self._eos, self._pool, self._packed)

    def _settle(self) -> None:
        if self._ahead is not None:
            try:
                self._packed = self._ahead.result(MASK_SECONDS)
            except TimeoutError:
                waited = f"the next token was not found in {MASK_SECONDS} s"
                raise GrammarFailed(f"the grammar gave up: {waited}", param="grammar") from None
            self._ahead = None

    def _advance(self) -> None:
        self._packed = None
        self._check()
        # read here, so that `finished` need not wait for the mask in the pool
        self.finished = bool(self._matcher.is_stopped())
        if self._pool is not None and not self.finished:
            self._ahead = self._pool.submit(self._matcher.compute_bitmask)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(self._complaint(), param="grammar")

    def _complaint(self) -> str:
        return f"the grammar gave up: {first_line(self._matcher.get_error())}"


@dataclass(frozen=True)
class Structure:
    """The constraint of a request's first choice, and warnings about what it does not enforce."""

    constraint: Constraint | AfterThoughts
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Compiled:
    wrong: str  # why the grammar is not valid, or empty
    matcher: Any = None
    packed: bytes = b""  # its first mask


class GrammarCompiler:
    """Compiles grammars over the vocabulary of one model's tokenizer (`fast`). Safe from any
    thread. `vocab_size`: rows of the output matrix. `pool` computes masks ahead. `background`
    compiles what no request waits for; `None`: the thread that needs it does. The cache holds at
    most `capacity` grammars with `letters` characters. `spaces`: white space in the JSON."""

    def __init__(
        self,
        fast: Any,
        eos: Iterable[int],
        vocab_size: int,
        *,
        pool: Executor | None = None,
        background: Executor | None = None,
        capacity: int = 128,
        letters: int = KEPT_LETTERS,
        spaces: Whitespace = ONE_LINE,
    ) -> None:
        self.fast, self.spaces, self.background = fast, spaces, background
        self._eos, self._vocab_size, self._pool = frozenset(eos), vocab_size, pool
        self._capacity, self._letters = capacity, letters
        self.compiled: OrderedDict[tuple[str, str], _Compiled] = OrderedDict()
        """By namespace and text: a hit of another tenant's grammar would show in response times."""
        self._tokenizer: LLTokenizer | None = None
        self._trial = GrammarTrial(vocab_size, self._specials[1])
        self._lock = threading.Lock()
        self._building = threading.Lock()

    def structure(
        self,
        request: GenerateRequest,
        calls: CallGrammar | None = None,
        thoughts: Thoughts | None = None,
        messages: MessageGrammar | None = None,
    ) -> Structure | None:
        """The constraint for what the request demands; `None`: any text is allowed. `calls`: the
        format of calls; `None`: JSON objects. With `thoughts`, the reply may begin with a thought;
        with `messages`, too, unless the grammar is the client's; they also say how an answer opens.
        Raises `BadRequest` that names the parameter, and for schemas the keyword."""
        preface = messages.answer if messages else ""
        allowance = Allowance(namespace=request.namespace)

        def problem_of(lark: str) -> str:
            return self._find_compiled(lark, allowance).wrong

        form = request_form(request, calls, self.split, problem_of, preface, self.spaces)
        if form is None:
            return None
        if messages is not None and not form.of_client:
            form = after_message(form, messages, self.split)
        return Structure(self.constraint(form, thoughts, request.namespace), form.warnings)

    def constraint(
        self, form: GrammarForm, thoughts: Thoughts | None = None, namespace: str = ""
    ) -> Constraint | AfterThoughts:
        """Compile `form`. White space may precede it if it begins with JSON or follows `thoughts`.
        Raises `BadRequest`."""
        lark, space = form.lark, ""
        if form.begins_json:
            space = r"/[ \t\n]{1,8}/"
        elif thoughts is not None and not form.of_client:
            space = r"/[ \n]{1,3}/"
        if space:
            lark = lark.replace("start:", "start: LEAD? led\nled:", 1) + f"\nLEAD: {space}"
        made = self._find_compiled(lark, Allowance(namespace=namespace))
        if made.wrong:
            raise BadRequest(f"the grammar is not valid: {made.wrong}")
        matcher = made.matcher.deep_copy()
        constraint = Constraint(matcher, self._vocab_size, self._eos, self._pool, made.packed)
        if thoughts is None:
            return constraint
        return AfterThoughts(constraint, thoughts, self.fast, self._eos, self._vocab_size)

    def calls(
        self, request: GenerateRequest, calls: CallGrammar, spaces: Whitespace
    ) -> LLMatcher | None:
        """A matcher at the beginning of the calls, to copy. `None`: they cannot be enforced."""
        allowance = Allowance(namespace=request.namespace)
        # First try all schemas together: each one apart would take a place in the cache. If that
        # fails, also try each one apart, so that wrong ones of tools that are not strict go.
        for apart in (False, True):

            def problem_of(lark: str, *, apart: bool = apart) -> str:
                whole = lark.startswith("start: calls")
                return self._find_compiled(lark, allowance).wrong if apart or whole else ""

            with suppress(BadRequest):
                form = request_form(request, calls, self.split, problem_of, spaces=spaces)
                return form and self._find_compiled(form.lark, allowance).matcher
        return None

    def split(self, text: str) -> list[str | int]:
        """Cut text at special tokens, which become their ids; ends of a reply are left out."""
        pattern, ids = self._specials
        pieces: list[str | int] = [ids.get(piece, piece) for piece in pattern.split(text) if piece]
        return [piece for piece in pieces if isinstance(piece, str) or piece not in self._eos]

    @cached_property
    def _specials(self) -> tuple[re.Pattern[str], dict[str, int]]:
        """A pattern of all special tokens, and their ids by text."""
        added = self.fast.get_added_tokens_decoder()
        ids = {
            token.content: number
            for number, token in added.items()
            if token.content and (is_marker(token) or number in self._eos)
        }
        words = sorted(map(re.escape, ids), key=len, reverse=True)
        return re.compile(f"({'|'.join(words)})" if words else r"(?!)"), ids

    def _find_compiled(self, lark: str, allowance: Allowance) -> _Compiled:
        key = (allowance.namespace, lark)
        with self._lock:
            known = self.compiled.get(key)
            if known is not None:
                self.compiled.move_to_end(key)
                return known
        wrong = self._trial.find_fault(lark, allowance)
        made = _Compiled(first_line(wrong)) if wrong else self._compile(lark)
        if not made.wrong:
            with self._lock:
                self.compiled[key] = made
                letters = sum(len(lark) for _, lark in self.compiled)
                while len(self.compiled) > self._capacity or letters > self._letters:
                    (_, oldest), _ = self.compiled.popitem(last=False)
                    letters -= len(oldest)
        return made

    def _compile(self, lark: str) -> _Compiled:
        from llguidance import LLMatcher, LLParserLimits

        grammar, limits = LLMatcher.grammar_from_lark(lark), LLParserLimits(**LIMITS)
        made = LLMatcher(self._ll_tokenizer(), grammar, log_level=0, limits=limits)
        packed = b"" if made.is_error() else made.compute_bitmask()
        return _Compiled(first_line(made.get_error()) if made.is_error() else "", made, packed)

    def prepare(self) -> None:
        """Build the vocabulary on another thread. The request that needs it raises its error."""

        def build() -> None:
            with suppress(BadRequest):
                self._ll_tokenizer()

        threading.Thread(target=build, name="grammar vocabulary", daemon=True).start()

    def _ll_tokenizer(self) -> LLTokenizer:
        with self._building:
            if self._tokenizer is None:
                try:
                    self._tokenizer = grammar_tokenizer(self.fast, self._eos, self._vocab_size)
                except ValueError as unsupported:
                    raise BadRequest(
                        "this model's tokenizer cannot be constrained; leave out response_format, "
                        f"grammar and tool_choice ({unsupported})"
                    ) from None
            return self._tokenizer


def first_line(text: str) -> str:
    """The line of llguidance's error text that says what is wrong, at most 300 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    shown = next((line for line in reversed(lines) if line.startswith("error:")), "")
    gist = shown or (lines[0] if lines else "unknown error")
    return "no text at all fits it" if gist in _EMPTY else gist[:300]


@dataclass(frozen=True)
class Thoughts:
    """How a model marks thoughts. `opened`: the prompt ends inside a thought. Otherwise the model
    may open one with `start`, if that is one token. Each of `ends` closes it."""

    start: str
    ends: tuple[str, ...]
    opened: bool
    barred: tuple[str, ...] = ()
    """Single tokens that would end a thought, such as a call's opener: forbidden in thoughts."""


class AfterThoughts:
    """A constraint (`inner`) that applies after an optional thought; the methods do the same. In a
    thought, any text up to its end marker is allowed, but not the end of the reply."""

    def __init__(
        self, inner: Constraint, thoughts: Thoughts, fast: Any, eos: Iterable[int], vocab_size: int
    ) -> None:
        allowed = np.ones((vocab_size + 31) // 32 * 32, dtype=bool)
        allowed[vocab_size:] = False
        barred = [fast.token_to_id(text) for text in thoughts.barred]
        barred += eos
        allowed[[token for token in barred if token is not None and token < vocab_size]] = False
        self._free = np.packbits(allowed, bitorder="little").view(np.uint32)
        self._start: int | None = fast.token_to_id(thoughts.start) if thoughts.start else None
        """`None`: no thought can be opened any more."""
        self._inner, self._ends, self._fast = inner, thoughts.ends, fast
        self._thinking, self._tail = thoughts.opened, list[int]()

    def mask(self) -> NDArray[np.uint32]:
        if self._thinking:
            return self._free
        mask = self._inner.mask()
        if self._start is not None:
            mask[self._start // 32] |= np.uint32(1 << self._start % 32)
        return mask

    def forced_tokens(self) -> list[int]:
        return [] if self._thinking or self._start is not None else self._inner.forced_tokens()

    def advance(self, token: int) -> None:
        if self._thinking:
            self._think(token)
            return
        self._thinking, self._start = token == self._start, None
        if not self._thinking:
            self._inner.advance(token)

    def _think(self, token: int) -> None:
        # The marker may extend over several tokens, and the last of them may extend beyond it.
        longest = max(map(len, self._ends), default=0)
        self._tail = [*self._tail, token][-longest - 1 :]
        text = self._fast.decode(self._tail, skip_special_tokens=False)
        closed = [text.rpartition(end)[2] for end in self._ends if end in text]
        if not closed:
            return
        rest = min(closed, key=len)
        self._thinking, self._start, self._tail = False, None, []
        if rest.strip():
            self._inner.take_all(self._fast.encode(rest.strip(), add_special_tokens=False).ids)

    @property
    def finished(self) -> bool:
        return not self._thinking and self._inner.finished

    @property
    def complete(self) -> bool:
        return not self._thinking and self._inner.complete

    def fork(self) -> AfterThoughts:
        twin = copy(self)
        twin._inner = self._inner.fork()  # noqa: SLF001  (its own)
        return twin
