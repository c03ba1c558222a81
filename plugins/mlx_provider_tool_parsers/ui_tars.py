"""UI-TARS: labelled reasoning, and mouse and keyboard actions as calls of one tool.

`Thought: ...` or `Reflection: ... Action_Summary: ...`, then `Action: click(point='...')`.
Action space: the prompts in the model's own repository (bytedance/UI-TARS, prompt.py).
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from mlx_provider import CallGrammar, ReasoningParser, ToolCall, ToolParser
from mlx_provider.records import (
    NotACall,
    Reading,
    TextEnded,
    TextReader,
    Tools,
    claimed,
    read_block,
    read_turn_ends,
    report_call,
    scan_block,
)

from .blocks import JsonBlock
from .edges import Edges
from .schema import functions, properties
from .turn_ends import TURN_ENDS

ACTION = "Action:"
LABELS = ("Thought:", "Reflection:", "Action_Summary:")
TOOL = "computer"

_NAME = re.compile(r"\w*")
_BARE = re.compile(r"[^,()'\"\[\]]*")
_TAG = re.compile(r"<[^<>]*>")
_NUMBERS = re.compile(r"[\s\d.,()\[\]-]+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_QUOTES = ('"""', "'''", '"', "'")
_ESCAPES = {"n": "\n", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
_TWO_POINTS = frozenset({"drag", "select", "swipe"})
_PLACES = frozenset({"point", "start_point", "end_point", "start_box", "end_box"})
_FIRST = {"type": "content", "finished": "content", "hotkey": "key", "open_app": "app_name"}
"""Names of arguments that a model leaves without one."""
_HELD = frozenset(
    {"ctrl", "control", "shift", "alt", "option", "cmd", "command", "meta", "win", "super", "fn"}
)
"""Keys that are held while another is pressed."""


def scan(reader: TextReader, tools: Tools) -> Reading[None]:
    """One label and its actions, one per line, or a call of another tool as a JSON object."""
    yield from reader.expect(ACTION)
    yield from reader.space()
    if (yield from reader.at("{")):
        yield from JsonBlock(()).between(reader)
        return
    while True:
        verb = yield from _verb(reader)
        arguments: dict[str, Any] = {}
        yield from claimed(_arguments(reader, verb, arguments))
        report_call(reader, _call(verb, arguments, tools))
        mark = reader.mark()
        yield from reader.space()
        another = yield from _is_verb(reader)
        if not another:
            reader.rewind(mark)
            return
        reader.release()


def _verb(reader: TextReader) -> Reading[str]:
    verb = yield from reader.run(_NAME)
    if not (yield from reader.peek()):
        raise TextEnded
    if not verb.isidentifier() or not (yield from reader.accept("(")):
        raise NotACall("not an action")
    return verb


def _is_verb(reader: TextReader) -> Reading[bool]:
    """Whether an action is next. Nothing is read."""
    mark = reader.mark()
    verb = yield from reader.run(_NAME)
    found = verb.isidentifier() and (yield from reader.at("("))
    reader.rewind(mark)
    return bool(found)


def _arguments(reader: TextReader, verb: str, found: dict[str, Any]) -> Reading[None]:
    """Keywords up to the closing parenthesis."""
    while True:
        yield from reader.space()
        if (yield from reader.accept(")")):
            return
        key = yield from reader.run(_NAME)
        yield from reader.space()
        if not key:
            key = _FIRST.get(verb, "") if not found else ""
        else:
            yield from reader.expect("=")
            yield from reader.space()
        if not key or key in found:
            raise NotACall("an argument has a name")
        found[key] = yield from _value(reader)
        yield from reader.space()
        if not (yield from reader.accept(",")) and not (yield from reader.at(")")):
            yield from reader.char()
            raise NotACall("expected a comma")


def _value(reader: TextReader) -> Reading[Any]:
    quote = yield from reader.accept(*_QUOTES)
    if quote:
        return (yield from _quoted(reader, quote))
    text = yield from _unquoted(reader)
    if not text:
        raise NotACall("an argument has a value")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _quoted(reader: TextReader, quote: str) -> Reading[str]:
    """Text up to the quote after which the call continues: models do not escape apostrophes."""
    parts: list[str] = []
    while True:
        found = yield from reader.pass_until((quote, "\\"), parts.append)
        if not found:
            raise TextEnded
        reader.skip(len(found))
        if found != quote:
            escaped = yield from reader.char()
            parts.append(_ESCAPES.get(escaped, "\\" + escaped))
        elif (yield from _ends_value(reader)):
            return "".join(parts)
        else:
            parts.append(found)


def _ends_value(reader: TextReader) -> Reading[bool]:
    mark = reader.mark()
    yield from reader.space()
    ends = bool((yield from reader.at(")")))
    if not ends and (yield from reader.accept(",")):
        yield from reader.space()
        named = yield from reader.run(_NAME)
        yield from reader.space()
        ends = bool(named and (yield from reader.at("=")))
    reader.rewind(mark)
    return ends


def _unquoted(reader: TextReader) -> Reading[str]:
    """A number, a word, or a pair in brackets."""
    text, depth = "", 0
    while True:
        text += yield from reader.run(_BARE)
        following = yield from reader.peek()
        if not following:
            raise TextEnded
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(following, 0)
        if depth < 0 or (depth == 0 and following == ","):
            return text.strip()
        text += reader.skip(1)


def _call(verb: str, arguments: dict[str, Any], tools: Tools) -> ToolCall:
    """A call of the tool for actions, or of a tool with the name of the action."""
    known = functions(tools)
    placed = {key: _placed(key, value) for key, value in arguments.items()}
    if TOOL not in known and verb in known:
        return ToolCall(verb, json.dumps(placed, ensure_ascii=False))
    named = {"action": verb}
    for key, value in placed.items():
        named.setdefault(_named(verb, key), _pressed(verb, key, value))
    takers = [name for name in known if "action" in properties(tools, name)]
    name = takers[0] if TOOL not in known and len(takers) == 1 else TOOL
    return ToolCall(name, json.dumps(named, ensure_ascii=False))


def _placed(key: str, value: Any) -> Any:
    """Coordinates as numbers: `<point>1 2</point>`, `<|box_start|>(1,2)<|box_end|>`, `(1,2)`."""
    if key not in _PLACES or not isinstance(value, str | tuple | list):
        return value
    text = _TAG.sub(" ", value if isinstance(value, str) else str(value))
    numbers = [float(x) for x in _NUMBER.findall(text)]
    if not _NUMBERS.fullmatch(text) or len(numbers) not in (2, 4):
        return value
    return [int(x) if x.is_integer() else x for x in numbers]


def _named(verb: str, key: str) -> str:
    """One name for a position, which versions of the model name differently."""
    if key not in _PLACES:
        return key
    if verb in _TWO_POINTS:
        return key.replace("_box", "_point")
    return "point"


def _pressed(verb: str, key: str, value: Any) -> Any:
    """`ctrl c` is two keys at once; `page down` is one key."""
    keys = value.split() if verb == "hotkey" and key == "key" and isinstance(value, str) else []
    return "+".join(keys) if keys and keys[0].lower() in _HELD else value


CALLS = ToolParser(
    name="ui_tars",
    start=ACTION,
    end="",
    scan=scan,
    markers=("<|box_start|>", "<|box_end|>"),
    aliases=("ui_tars_1_5",),
    grammar=CallGrammar.json(f"{ACTION}\n", ""),
)
"""Its own way of writing holds actions alone: a call of any tool is forced as a JSON object."""


def read_ui_tars(reader: TextReader, tools: Tools | None) -> Reading[None]:
    """A whole reply: labelled reasoning, then actions or an answer, repeated."""
    yield from _thoughts(reader)
    while True:
        found = yield from reader.pass_until((ACTION,) if tools is not None else (), reader.content)
        if not found:
            return
        scan = scan_block(CALLS, reader, tools or ())
        called = yield from read_block(reader, scan, CALLS, ACTION, reader.content, tools or ())
        reader.forget_marks()
        if called:
            space = yield from read_turn_ends(reader, TURN_ENDS, (ACTION,))
            if not (yield from _thoughts(reader)) and (yield from reader.at(ACTION)) != ACTION:
                reader.content(space)


def _thoughts(reader: TextReader) -> Reading[bool]:
    """Read the reasoning at this position, if any. Labels can follow a marked one."""
    found = yield from _thought(reader, "")
    more = found
    while more:
        more = yield from _thought(reader, "\n")
    return found


def _thought(reader: TextReader, before: str) -> Reading[bool]:
    """Read reasoning with its labels, if there is any. `before`: text to separate it."""
    mark = reader.mark()
    yield from reader.space()
    found = yield from reader.at("<think>", *LABELS)
    if not found:
        reader.rewind(mark)
        return False
    reader.release()
    reader.reason()
    reader.reasoning(before)
    if found == "<think>":
        reader.skip(len(found))
        found = yield from reader.pass_until(("</think>",), Edges(reader.reasoning).piece)
        reader.skip(len(found))
    else:
        yield from _labelled(reader)
    reader.answer()
    yield from reader.space()
    return True


def _labelled(reader: TextReader) -> Reading[None]:
    """Read up to an action, an answer, or a blank line without a label after it."""
    show = Edges(reader.reasoning).piece
    while True:
        found = yield from reader.pass_until((ACTION, "\nAnswer:", "\n\n"), show)
        mark = reader.mark()
        reader.skip(len(found))
        yield from reader.space()
        if found == ACTION:
            ended = yield from _is_verb(reader)
        else:
            ended = not found.isspace() or not (yield from reader.at(*LABELS))
        reader.rewind(mark)
        if ended:
            return
        show(reader.skip(len(found)))


PARSERS = (CALLS,)
REASONING_PARSERS = (
    ReasoningParser(
        name="ui_tars",
        start="",
        end="",
        whole=read_ui_tars,
        markers=("<|box_start|>", "<|box_end|>"),
        aliases=("ui_tars_1_5",),
    ),
)
