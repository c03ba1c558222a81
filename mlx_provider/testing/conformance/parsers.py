"""The checks of tool parsers (`TOOL_CHECKS`) and reasoning parsers (`REASONING_CHECKS`): what they
read from any text, and whether a tool parser agrees with its grammar. Each is a function of a
`Format` or of `Thoughts`, and its docstring is the promise."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from hypothesis import strategies as st

from ...chat.output.whole_reply import WholeReply, read_chunks
from ...errors import BadRequest
from ...records import ReasoningParser, ToolParser
from ...serving.structure import check_readable
from . import Nonconformity, NotApplicable, calls, demand, same
from .calls import FRAGMENTS, ByteModel, cut, for_examples, replies

SEEDS = 16  # replies that a random model writes under the grammar
LONGEST = 600  # tokens of such a reply
NESTED = 2000  # repetitions of an opening text in a bomb
LONG = 24_000  # characters of a bomb that does not nest
PIECE = 12  # characters of a chunk of a bomb
EXAMPLES = 60
WORK = 30.0  # seconds for a bomb; reading each character once takes a fraction of one
BEFORE = "So I will do it. "  # text before a call


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise `Nonconformity` inside the block after so much processor time of this process."""
    summary = f"{what} was not done after {seconds:g} s of work"
    expired: list[bool] = []

    def stop(number: int, frame: Any) -> None:
        expired.append(True)
        raise Nonconformity(summary)

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    if expired:  # the isolation of the plugin may have caught the error
        raise Nonconformity(summary)


@dataclass(frozen=True)
class Thoughts:
    """A reasoning parser, as the subject of checks."""

    parser: ReasoningParser
    starts = (None, True, False)  # the values of `inside` that `read` takes

    def read(self, chunks: Sequence[str], inside: bool | None = None) -> WholeReply:
        """Read a reply in chunks. `inside`: whether the prompt ended in a thought; `None`: unknown.
        Raises `Nonconformity` if the parser fails."""
        formats = {"reasoning_parser": self.parser, "reasoning_open": inside}
        return _demand_no_faults(read_chunks(chunks, **formats), chunks)

    def replies(self) -> st.SearchStrategy[str]:
        """Random replies with the markers of this format."""
        return replies(self.parser.visible())

    def bombs(self) -> Iterator[tuple[str, int]]:
        """Large replies, each with the characters of a chunk."""
        start = self.parser.start
        yield from ((marker * NESTED, PIECE) for marker in self.parser.visible())
        yield (start + self.parser.end) * 1000, PIECE
        yield start + "lorem < ipsum " * (LONG // 14), PIECE


@dataclass(frozen=True)
class Format:
    """A tool parser, as the subject of checks. It is used like `Thoughts`, with more methods."""

    parser: ToolParser
    thoughts: ReasoningParser | None  # of the same name in this plugin, for formats with `whole`
    starts = (None,)

    @property
    def model(self) -> ByteModel:
        """The random model that writes under the grammar."""
        return calls.demo_model()

    def read(
        self, chunks: Sequence[str], inside: bool | None = None,
        tools: Sequence[Any] = (calls.TOOL,),
    ) -> WholeReply:  # fmt: skip
        """Like `Thoughts.read`; `inside` has no effect."""
        formats = {"tool_parser": self.parser, "reasoning_parser": self.thoughts}
        return _demand_no_faults(read_chunks(chunks, tools=tools, **formats), chunks)

    def replies(self) -> st.SearchStrategy[str]:
        """Random replies with markers, calls and half calls of this format."""
        call = self.call_text("put", calls.PLAIN, calls.SCHEMA)
        return replies((*self.parser.visible(), call, call[: len(call) // 2]))

    def call_text(self, name: str, arguments: Any, schema: Any) -> str:
        """A call as the grammar writes it. `schema`: the parameters of the tool."""
        return self.parser.call_grammar().write(name, arguments, schema)

    def constraint(self, tools: Sequence[Any]) -> Any:
        """The constraint of a reply that must call a tool."""
        grammar = self.parser.call_grammar()
        return self.model.start(grammar, tools=list(tools), tool_choice="required")

    def calls_in(self, text: str, tools: Sequence[Any]) -> tuple[list[calls.Called], str]:
        """The calls that the parser reads, and the text beside them. Raises `Nonconformity` if it
        fails or if arguments are no JSON."""
        found = self.read([text], tools=tools)
        summary = f"arguments of {text!r} are no JSON: {found.calls}"
        demand(len(found.whole_calls) == len(found.calls), summary)
        return found.whole_calls, (found.content + found.reasoning).strip()

    def marks(self) -> tuple[str, ...]:
        """The openers that are more than brackets of JSON."""
        every = (*self.parser.openers(), *self.parser.first)
        return tuple(mark for mark in every if mark.rstrip("[{"))

    def bombs(self) -> Iterator[tuple[str, int]]:
        """Large and nested replies, each with the characters of a chunk."""
        call = self.call_text("put", {"text": "x"}, calls.SCHEMA)
        head = call[: call.index("x")] if "x" in call else call[: len(call) // 2]
        heads = ["", head, self.call_text("put", {"list": []}, calls.SCHEMA).partition("[]")[0]]
        openers = self.parser.openers() + self.parser.first
        bodies = [opener * 300 for opener in openers]
        bodies += [
            opener + piece * NESTED
            for opener in (*openers, *heads)
            for piece in ("[", '{"a": ', "{a:", "f(a=", "<a>", *openers[:1])
        ]
        for closer in ("", *self.parser.closers()[:1]):
            yield from ((body + closer, 1000) for body in bodies)
        yield head + 'lorem ipsum, [dolor] "sit" ' * (LONG // 27), PIECE


def _demand_no_faults(found: WholeReply, chunks: Sequence[str]) -> WholeReply:
    text = f"{''.join(chunks)!r:.1000}"
    demand(not found.faults, f"the parser fails on {text}: {'; '.join(found.faults)[:600]}")
    return found


def any_chunking(of: Format | Thoughts) -> None:
    """A reply reads the same however its text is cut, and the parser raises only the errors that
    mean that a text is no call."""

    def check(value: tuple[str, list[int], bool | None]) -> None:
        text, sizes, inside = value
        whole = of.read([text], inside)
        for chunks in (list(text), cut(text, sizes)):
            found = of.read(chunks, inside)
            same(found, whole, f"{text!r} reads otherwise in the pieces {chunks[:40]}")

    cuts = st.lists(st.integers(0, 12), max_size=40)
    for_examples(st.tuples(of.replies(), cuts, st.sampled_from(of.starts)), EXAMPLES, check)


def plain_text(of: Format | Thoughts) -> None:
    """Text that holds none of its markers arrives unchanged, beginnings of them included."""
    if isinstance(of, Thoughts) and of.parser.whole is not None:
        raise NotApplicable("the format addresses every message: there is no text without marks")
    prefix = of.parser.prefix if isinstance(of, Thoughts) else ""

    def check(parts: list[str]) -> None:
        text = "".join(parts)
        marks = [marker for marker in of.parser.visible() if len(marker) > 2]
        if text.isspace() or any(marker in text for marker in marks):
            return
        for chunks in ([text], list(text)):
            found = of.read(chunks, False)
            changed = f"{text!r} is no text any more"
            same((found.content, found.reasoning, found.calls), (prefix + text, "", ()), changed)

    for_examples(st.lists(st.sampled_from(FRAGMENTS), max_size=12), EXAMPLES, check)


def grammar_to_parser(of: Format) -> None:
    """Whatever the grammar lets a model write, the parser reads as exactly that call, and its
    arguments fit the tool's schema."""
    start, complete = of.constraint(calls.TOOLS), 0
    schemas = {tool["function"]["name"]: tool["function"] for tool in calls.TOOLS}
    for seed in range(SEEDS):
        text, done = of.model.sample(start.fork(), seed, LONGEST)
        if not done:
            continue
        complete += 1
        found, prose = of.calls_in(text, calls.TOOLS)
        summary = f"of {text!r}, which the grammar allows, the parser makes {found} and {prose!r}"
        demand(bool(found) and not prose, summary)
        for name, arguments in found:
            demand(name in schemas, f"{summary}: no such tool")
            validator = jsonschema.Draft202012Validator(schemas[name].get("parameters", True))
            errors = [error.message for error in validator.iter_errors(arguments)]
            demand(not errors, f"{summary}: {errors}")
    demand(complete > 0, f"of {SEEDS} random replies none ends within {LONGEST} tokens")
    start = of.constraint([calls.TOOL])

    def check(arguments: dict[str, Any]) -> None:
        text = of.call_text("put", arguments, calls.SCHEMA)
        if of.model.accepts(start.fork(), text):
            wanted = [("put", calls.expected_arguments(of.parser, arguments))]
            summary = f"the grammar allows {text!r}, which the parser reads otherwise"
            same(of.calls_in(text, [calls.TOOL]), (wanted, ""), summary)

    for_examples(calls.calls(of.parser, nested=False), 40, check)
    for piece in calls.pieces(of.parser):
        for arguments in ({"text": f"a{piece}b", "note": ""}, {"note": piece}):
            check(arguments)


def parser_to_grammar(of: Format) -> None:
    """A call that the parser reads may be written under the grammar."""
    tools = [calls.TOOL, calls.PING]
    for name, arguments, schema in (("put", calls.PLAIN, calls.SCHEMA), ("ping", {}, {})):
        text = of.call_text(name, arguments, schema)
        same(of.calls_in(text, tools), ([(name, arguments)], ""), f"{text!r} reads otherwise")
        summary = f"the grammar does not allow {text!r}, which the parser reads"
        demand(of.model.accepts(of.constraint(tools), text), summary)


def odd_names(of: Format) -> None:
    """A tool is refused by name or its calls are read, whatever its names are."""

    def refusal_of(tool: Any) -> str:
        try:
            check_readable(of.model.request(tools=[tool], tool_choice="required"), of.parser)
        except BadRequest as error:
            return str(error)
        return ""

    def check(value: tuple[str, list[str], str]) -> None:
        called, keys, kind = value
        tool = calls.function_of(called, keys, kind)
        arguments = dict.fromkeys(keys, calls.VALUES[kind])
        text = of.call_text(called, arguments, tool["function"]["parameters"])
        of.read([text], tools=[tool])
        if not refusal_of(tool):
            demand(of.model.accepts(of.constraint([tool]), text), f"the grammar bars {text!r}")
            wanted = ([(called, arguments)], "")
            same(of.calls_in(text, [tool]), wanted, f"{text!r} reads otherwise")

    names = calls.WORD | calls.ODD_NAME
    keys = st.lists(names, max_size=3, unique=True)
    for_examples(st.tuples(names, keys, st.sampled_from(sorted(calls.VALUES))), 40, check)
    for name in ("f", "get_weather", "Bash", "mcp__server__tool", "a1"):
        refusal = refusal_of(calls.function_of(name, ["path", "old_string", "X"], "string"))
        demand(not refusal, f"a name that people give is refused: {refusal}")


def cut_replies(of: Format) -> None:
    """A reply that ends inside a call raises nothing, keeps the text before it, and shows no piece
    of the call. A sentence with an opener stays whole."""
    arguments = {"text": "two\nlines", "count": 3, "list": ["a", {"b": None}]}
    call = of.call_text("put", arguments, calls.SCHEMA)
    for end in range(len(call)):
        for before in ("", BEFORE):
            text = before + call[:end]
            _demand_nothing_lost(of, text, before, of.read([text]))
    for opener in of.marks() if of.parser.whole is None else ():
        text = f"{BEFORE}It begins with {opener} and so on."
        left = of.read([text]).content
        demand(left == text, f"of the sentence {text!r} only {left!r} is left")


def _demand_nothing_lost(of: Format, text: str, before: str, found: WholeReply) -> None:
    """`found` was read from `text`: `before`, then the beginning of a call."""
    left = (found.content + found.reasoning).strip()
    summary = f"of the cut reply {text!r} only {left!r} and {found.calls} are left"
    demand(before.strip() in left, f"the text before the call is lost: {summary}")
    if found.calls:
        name, arguments = found.calls[0]
        demand(len(found.calls) == 1 and name == "put", f"it becomes another call: {summary}")
        demand(arguments == "" or arguments[0] == "{", f"its arguments are no JSON: {summary}")
    elif of.parser.whole is None and text[len(before) :].startswith(of.marks()):
        demand(left == before.strip(), f"a piece of a call is shown as text: {summary}")


def bombs(of: Format | Thoughts) -> None:
    """Size and nesting cost bounded work, and raise nothing."""
    for body, size in of.bombs():
        for inside in of.starts:
            with time_limit(WORK, f"{body[:60]!r}... of {len(body)} characters"):
                of.read([body[at : at + size] for at in range(0, len(body), size)], inside)


def thoughts_and_answer(of: Thoughts) -> None:
    """What stands between the markers is the thought, what follows the answer; also where the
    prompt has opened the thought."""
    parser = of.parser
    if parser.whole is not None or not parser.start or not parser.end:
        raise NotApplicable("its thoughts do not stand between two markers")
    rest = f"first this\n{parser.end}\n\nthen that"
    for text, inside in ((f"{parser.start}{parser.header}\n{rest}", False), (rest, True)):
        found = of.read([text], inside)
        parts = found.reasoning.strip(), found.content.strip()
        same(parts, ("first this", "then that"), repr(text))


def cut_thoughts(of: Thoughts) -> None:
    """A reply that ends anywhere raises nothing, and no word of it is lost."""
    parser = of.parser
    text = f"{parser.start}{parser.header}\nalpha beta\n{parser.end}\n\ngamma"
    for end in range(len(text) + 1):
        for inside in of.starts:
            found = of.read([text[:end]], inside)
            left = found.reasoning + found.content
            lost = [w for w in ("alpha", "beta", "gamma") if w in text[:end] and w not in left]
            demand(not lost, f"of the cut reply {text[:end]!r} only {left!r} is left")


TOOL_CHECKS = (
    *(any_chunking, plain_text, grammar_to_parser, parser_to_grammar, odd_names, cut_replies),
    bombs,
)
REASONING_CHECKS = (any_chunking, plain_text, thoughts_and_answer, cut_thoughts, bombs)
