"""Tests the chat template: it must show what agents send, and our parser must read its calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..chat.output.whole_reply import read_chunks
from ..families.tokenizer.hf_tokenizer import NO_TEXT_BESIDE_CALLS, common_length
from ..records import ReasoningParser, ToolParser
from .findings import Finding
from .formats import Formats
from .subject import Subject

Message = dict[str, Any]

TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "find_zyzzyva",
            "description": "Finds the weevil.",
            "parameters": {
                "type": "object",
                "properties": {"leaf": {"type": "string"}, "depth": {"type": "integer"}},
                "required": ["leaf"],
            },
        },
    }
]
SHOWN = ("find_zyzzyva", "weevil", "leaf", "depth")
CALLS = ({"leaf": "xLEAFx", "depth": 3}, {"leaf": "xBARKx", "depth": 4})
RESULTS = ("xRESULTx", "xOUTCOMEx")
CALL_ID = "call_0f3c9e5b7a2d48619c1e00d"
"""Has the length of clients' ids."""
AS_DATA = ("{'type'", '{"type"')
"""Text of a message part that a template has formatted as a Python or JSON value."""
OTHER = "take another conversion of the model, or put its maker's chat_template.jinja beside it"
PARSER = "name a format that fits with model_info.mlx.tool_parser, or mend its parser"


def plain(subject: Subject) -> Iterator[Finding]:
    """Whether a second turn begins with the tokens of the first."""
    formats = _formats(subject)
    if formats is None:
        return
    first = formats.shown([_said("user", "xONEx")]).text
    if "xONEx" not in first:
        yield Finding("template.plain", "fail", "the user's text does not reach the prompt", OTHER)
        return
    yield Finding("template.plain", "ok", "a user's message reaches the prompt")
    turns = [_said("user", "xONEx"), _said("assistant", "xTWOx"), _said("user", "xTHREEx")]
    same = common_length(first, formats.shown(turns).text)
    if same < first.index("xONEx") + len("xONEx"):
        summary = "a later turn writes the first message otherwise: nothing of a prompt is reused"
        yield Finding("template.prefix", "warn", summary, OTHER)


def system(subject: Subject) -> Iterator[Finding]:
    """Several system messages, one of them late, as Claude Code and Codex send them."""
    formats = _formats(subject)
    if formats is None:
        return
    text = formats.shown(
        [
            _said("system", "xFIRSTx"),
            _said("developer", "xSECONDx"),
            _said("user", "xONEx"),
            _said("assistant", "xTWOx"),
            _said("system", "xLATEx"),
            _said("user", "xTHREEx"),
        ]
    ).text
    words = ("xFIRSTx", "xSECONDx", "xONEx", "xLATEx", "xTHREEx")
    yield _arrives("template.system", text, words, "several system messages")


def tools(subject: Subject) -> Iterator[Finding]:
    formats = _formats(subject)
    if formats is None:
        return
    shown = formats.shown([_said("user", "xONEx")], TOOLS)
    lost = _lost(shown.text, SHOWN)
    if lost:
        summary = f"the template does not show tools ({', '.join(lost)} missing)"
        remedy = "agents need a model whose template shows tools: take another one for them"
        yield Finding("template.tools", "warn", summary, remedy)
    elif shown.described:
        summary = f"the template shows no tools: this system message does\n{shown.described}"
        yield Finding("template.tools", "note", summary)
    else:
        yield Finding("template.tools", "ok", "tools reach the prompt")


def history(subject: Subject) -> Iterator[Finding]:
    """Earlier calls and results, and whether our parser reads what the template writes."""
    formats = _formats(subject)
    if formats is None:
        return
    asked = [_said("user", "xONEx")]
    shown = formats.shown([*asked, *_called(), _said("user", "xTHREEx")], TOOLS)
    words = ("find_zyzzyva", "xLEAFx", "xBARKx", *RESULTS, "xTHREEx")
    found = _arrives("template.history", shown.text, words, "earlier calls and results")
    prompt = formats.shown(asked, TOOLS).text
    yield found
    if formats.tokenizer.form.text_with_calls == "dropped":
        yield Finding("template.text_with_calls", "warn", NO_TEXT_BESIDE_CALLS, OTHER)
    if shown.folded:
        summary = "the template takes no calls or results: they are written as text"
        remedy = f"an agent's turns do not reach the model in its own form: {OTHER}"
        yield Finding("template.tool_messages", "warn", summary, remedy)
    elif formats.tool_parser is not None:
        written = shown.text[common_length(prompt, shown.text) :]
        yield _read_back(formats.tool_parser, written)


def thinking(subject: Subject) -> Iterator[Finding]:
    """Thoughts are read, can be switched, and keep earlier answers whole."""
    formats = _formats(subject)
    if formats is None:
        return
    asked = [_said("user", "xONEx")]
    thought = {**_said("assistant", "xANSWERx"), "reasoning_content": "xTHOUGHTx"}
    text = formats.shown([*asked, thought, _said("user", "xTHREEx")]).text
    words = ("xONEx", "xANSWERx", "xTHREEx")
    yield _arrives("template.thinking", text, words, "answers after thoughts")
    parser = formats.reasoning_parser
    if parser is None:
        if "reasoning_content" in (formats.template or ""):
            summary = "the template writes thoughts, but no parser knows its format"
            remedy = "name one with model_info.mlx.reasoning_parser, or write a plugin for it"
            yield Finding("template.thoughts", "warn", summary, remedy)
        return
    if parser.whole is None and parser.start and parser.end:
        yield _thought_read(parser)
    off, on = (formats.shown(asked, enable_thinking=each).text for each in (False, True))
    summary = "can" if on != off else "cannot"
    yield Finding("template.switch", "ok", f"thinking {summary} be switched by enable_thinking")


def images(subject: Subject) -> Iterator[Finding]:
    """Whether the template has a place for an image."""
    formats = _formats(subject)
    if formats is None or not subject.config.get("vision_config"):
        return
    parts: list[Message] = [{"type": "image"}, {"type": "text", "text": "xONEx"}]
    seen = formats.tokenizer.apply_template([{"role": "user", "content": parts}], [], {})
    bare = formats.tokenizer.apply_template([{"role": "user", "content": parts[1:]}], [], {})
    as_data = any(mark in seen for mark in AS_DATA)
    if "xONEx" in seen and len(seen) > len(bare) and not as_data:
        yield Finding("template.images", "ok", "an image has its place in the prompt")
    else:
        summary = "the model sees, but its template has no place for an image"
        yield Finding("template.images", "fail", summary, OTHER)


CHECKS = (plain, system, tools, history, thinking, images)


def _formats(subject: Subject) -> Formats | None:
    """`None`: no template."""
    formats = subject.formats
    return None if formats is None or formats.template is None else formats


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _called() -> list[Message]:
    calls = [
        {
            "id": f"{CALL_ID}{number}",
            "type": "function",
            "function": {"name": "find_zyzzyva", "arguments": json.dumps(arguments)},
        }
        for number, arguments in enumerate(CALLS)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"{CALL_ID}{number}", "content": result}
        for number, result in enumerate(RESULTS)
    ]
    return [{"role": "assistant", "content": None, "tool_calls": calls}, *results]


def _lost(text: str, words: Sequence[str]) -> list[str]:
    return [word for word in words if word not in text]


def _arrives(name: str, text: str, words: Sequence[str], what: str) -> Finding:
    lost = _lost(text, words)
    if lost:
        return Finding(name, "fail", f"{what}: the template drops {', '.join(lost)}", OTHER)
    return Finding(name, "ok", f"{what} reach the prompt whole")


def _read_back(parser: ToolParser, written: str) -> Finding:
    reply, name = read_chunks([written], tools=TOOLS, tool_parser=parser), parser.name
    expected = [("find_zyzzyva", arguments) for arguments in CALLS]
    if reply.faults or reply.cut_calls or reply.whole_calls != expected:
        found = list(reply.calls)
        summary = f"calls as the template writes them are not read back by {name}: {found}"
        return Finding("template.round_trip", "fail", summary, PARSER)
    return Finding("template.round_trip", "ok", f"calls in the history are read back by {name}")


def _thought_read(parser: ReasoningParser) -> Finding:
    """Whether it is separated from the answer."""
    text = f"{parser.start}\nxTHOUGHTx\n{parser.end}\n\nxANSWERx"
    reply = read_chunks([text], reasoning_parser=parser)
    answered = "xANSWERx" in reply.content and "xTHOUGHTx" not in reply.content
    if "xTHOUGHTx" in reply.reasoning and answered:
        return Finding("template.thoughts", "ok", f"thoughts are told apart as {parser.name}")
    summary = f"thoughts are not told from answers by {parser.name}"
    return Finding(
        "template.thoughts", "fail", summary, "name another with model_info.mlx.reasoning_parser"
    )
