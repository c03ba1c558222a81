"""Finds by short conversations which messages, tools and calls a chat template takes, and in which
form.

minja probes the same demands (`chat-template.hpp`: `requires_non_null_content`,
`requires_object_arguments`, `polyfill_tools`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from ...records import TemplateForm
from .template import TemplateRenderer, fit_messages, fit_tools, try_render

if TYPE_CHECKING:
    from .hf_tokenizer import HFTokenizer

Message = dict[str, Any]
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]
"""(messages, tools) -> the prompt. Raises `BadRequest` if the template refuses them."""

NAME, ABOUT, KEY = "find_zyzzyva", "xWEEVILx", "leaf"
ASKED, SAID, THOUGHT, ANSWERED, AGAIN = "xASKx", "xSAYx", "xTHINKx", "xANSWERx", "xAGAINx"
ADDED = "xADDx"
VALUES, RESULTS = ("xLEAFx", "xBARKx"), ("xRESULTx", "xOUTCOMEx")
PARTS = ("xPARTx", "xPIECEx")
IDS = ("call_24f5c1e07a9b4d31", "call_9be07c6612a84cf3")
TOOL: Message = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": ABOUT,
        "parameters": {
            "type": "object",
            "properties": {KEY: {"type": "string", "description": "The leaf."}},
            "required": [KEY],
        },
    },
}


def template_form(render: Render) -> TemplateForm:
    """Raises the errors of `render`, including `TemplateLimit`, except for `BadRequest`, by which a
    template refuses one form."""

    def probe(
        messages: Sequence[Message], form: TemplateForm, tools: Sequence[Message] = ()
    ) -> str | None:
        fitted = fit_messages(messages, form), fit_tools(tools, form)
        return try_render(lambda: render(*fitted))

    form, parts = TemplateForm(), TemplateForm(parts_only=True)
    asked = [_user(ASKED)]
    if ASKED not in (probe(asked, form) or "") and ASKED in (probe(asked, parts) or ""):
        form = parts
    form = _with_calls(probe, _with_tools(probe, form))
    lone = SAID in (probe([_SYSTEM], form) or "")
    return replace(form, text_parts=frozenset(_roles_in_parts(probe, form)), lone_system=lone)


def try_template(source: str) -> None:
    """Render the probe once, on any thread, so that the load on the engine thread waits for no slow
    template. Raises `UnsupportedModel` for a template that exceeds its limits."""
    render = TemplateRenderer(source, {}).render
    template_form(partial(render, variables={}, generation_prompt=True, probe=True))


def _user(text: Any) -> Message:
    return {"role": "user", "content": text}


Probe = Callable[..., str | None]
"""(messages, form, tools) -> the prompt. `None`: the template refuses them."""


def _with_tools(probe: Probe, form: TemplateForm) -> TemplateForm:
    alone = [_user(ASKED)]
    if _shows_tool(probe, form, alone):
        asked, shows = alone, form.shows_tools
    else:
        asked = [_SYSTEM, *alone]
        if not _shows_tool(probe, form, asked):
            return replace(form, shows_tools="never")
        shows = "with_system"
    needed = (field for field, tool in _INCOMPLETE.items() if probe(asked, form, [tool]) is None)
    form = replace(form, shows_tools=shows, tool_fields=frozenset(needed))
    return replace(form, type_lists=probe(asked, form, [_LISTED]) is not None)


def _shows_tool(probe: Probe, form: TemplateForm, asked: Sequence[Message]) -> bool:
    bare, shown = probe(asked, form) or "", probe(asked, form, [TOOL])
    return shown is not None and all(shown.count(w) > bare.count(w) for w in (NAME, ABOUT, KEY))


def _tool(**changes: Any) -> Message:
    function = {**TOOL["function"], **changes}
    return {**TOOL, "function": {k: value for k, value in function.items() if value is not None}}


def _parameter(**schema: Any) -> Message:
    return _tool(parameters={**TOOL["function"]["parameters"], "properties": {KEY: schema}})


_INCOMPLETE = {
    "description": _tool(description=None),
    "parameters": _tool(parameters=None),
    "properties": _parameter(type="string"),
    "additionalProperties": _parameter(type="object", description=""),
}
_LISTED = _parameter(type=["string", "null"], description="")


def _with_calls(probe: Probe, form: TemplateForm) -> TemplateForm:
    """`takes_calls` only if nothing of the turns is lost."""
    tools = [TOOL] if form.shows_tools == "always" else []
    prompt = probe([_user(ASKED)], form, tools) or ""

    def arrives(
        form: TemplateForm, turn: Message, words: Sequence[str] = (), then: Sequence[Message] = ()
    ) -> bool:
        calls, asked = len(turn["tool_calls"]), [*_conversation(turn), *then]
        wanted = (*words, *VALUES[:calls], *RESULTS[:calls])
        texts = (probe(messages, form, tools) for messages in (asked, [*asked, *_NEXT]))
        return all(_arrives(text, prompt, wanted, calls) for text in texts)

    found = _call_form(probe, form, tools, prompt, arrives)
    if found is None:
        return replace(form, takes_calls=False)
    says, said = _turn(1, content=SAID), [SAID]
    if not arrives(found, says, said):
        found = replace(found, text_with_calls="apart")
        if not arrives(found, says, said):
            found, said = replace(found, text_with_calls="dropped"), []
    found = replace(found, parallel_calls=arrives(found, _turn(2)))
    thinks = {**says, "reasoning_content": THOUGHT}
    found = replace(found, thought_with_text=arrives(found, thinks, said))
    beside = replace(found, thought_with_calls=True)
    shown = [THOUGHT in (probe(_conversation(thinks), f, tools) or "") for f in (found, beside)]
    found = beside if shown == [False, True] else found
    joined = replace(found, user_after_result=False)
    added = _turn(1), [ADDED], [_user(ADDED)]
    if not arrives(found, *added) and arrives(joined, *added):
        found = joined
    works = arrives(found, _turn(2)) and arrives(found, thinks, said)
    return found if works else replace(form, takes_calls=False)


def _call_form(
    probe: Probe,
    form: TemplateForm,
    tools: Sequence[Message],
    prompt: str,
    arrives: Callable[[TemplateForm, Message], bool],
) -> TemplateForm | None:
    """Prefers a form whose text begins with the `prompt`: a reply's tokens are then found again."""
    turn = _turn(1)
    fits = [variant for variant in _call_forms(form) if arrives(variant, turn)]
    for variant in fits:
        if (probe(_conversation(turn), variant, tools) or "").startswith(prompt):
            return variant
    return fits[0] if fits else None


def _call_forms(form: TemplateForm) -> Iterator[TemplateForm]:
    contents: tuple[Literal["null", "empty", "absent"], ...] = ("null", "empty", "absent")
    kinds: tuple[Literal["mapping", "text"], ...] = ("mapping", "text")
    ids = (form, replace(form, short_ids=True), replace(form, named_ids=True))
    for own, arguments, content in product(ids, kinds, contents):
        yield replace(own, empty_content=content, arguments=arguments)


def _turn(calls: int, **fields: Any) -> Message:
    listed = [
        {"id": i, "type": "function", "function": {"name": NAME, "arguments": {KEY: value}}}
        for i, value in list(zip(IDS, VALUES, strict=True))[:calls]
    ]
    return {"role": "assistant", "content": None, **fields, "tool_calls": listed}


def _conversation(turn: Message, *, results: Sequence[Any] = RESULTS) -> list[Message]:
    pairs = zip(IDS, results, strict=True)
    results = [
        {"role": "tool", "tool_call_id": i, "content": result}
        for i, result in list(pairs)[: len(turn["tool_calls"])]
    ]
    return [_user(ASKED), turn, *results]


def called_once() -> list[Message]:
    """A question, one call and its result, as the probe renders them."""
    return _conversation(_turn(1))


_SYSTEM: Message = {"role": "system", "content": SAID}
_NEXT: list[Message] = [{"role": "assistant", "content": ANSWERED}, _user(AGAIN)]


def _arrives(text: str | None, prompt: str, words: Sequence[str], calls: int) -> bool:
    if text is None or any(word not in text for word in (ASKED, *words)):
        return False
    if text.count(NAME) < prompt.count(NAME) + calls:
        return False
    odd = ("None", f"'{KEY}'", f'\\"{KEY}')
    return all(text.count(word) <= prompt.count(word) for word in odd)


def _roles_in_parts(probe: Probe, form: TemplateForm) -> Iterator[str]:
    """Roles whose text parts both arrive, and not as data."""
    parts = [{"type": "text", "text": text} for text in PARTS]
    asked, answer = _user(ASKED), {"role": "assistant", "content": parts}
    conversations = {
        "system": [{"role": "system", "content": parts}, asked],
        "user": [_user(parts)],
        "assistant": [asked, answer, asked],
    }
    if form.takes_calls:
        conversations["tool"] = _conversation(_turn(1), results=(parts, ""))
    for role, messages in conversations.items():
        text = probe(messages, form) or ""
        if all(text.count(word) == 1 for word in PARTS) and not any(d in text for d in _AS_DATA):
            yield role


_AS_DATA = ("'type'", '"type"')


def dialect(tokenizer: HFTokenizer) -> dict[str, Any]:
    """Fields of `ModelInfo` that describe the required form of messages and tools. Raises
    `UnsupportedModel` for a template that exceeds its limits."""
    return {
        "template": tokenizer.form,
        "alternate": wants_turns(tokenizer),
        "system_role": has_system_role(tokenizer),
    }


def wants_turns(tokenizer: HFTokenizer) -> bool:
    user, reply = _user(ASKED), _NEXT[0]
    pairs = [([user], [user, user]), ([user, reply, user], [user, reply, reply, user])]
    return any(
        _render(tokenizer, single) is not None and _render(tokenizer, doubled) is None
        for single, doubled in pairs
    )


def has_system_role(tokenizer: HFTokenizer) -> bool:
    """Whether a system message is shown, also if a tool result comes last. Some templates raise for
    it, others drop it or write it into the last message, if that is a user's."""
    conversations = [[_user(ASKED)]]
    if tokenizer.form.takes_calls:
        conversations.append(_conversation(_turn(1)))
    return all(
        SAID in (_render(tokenizer, [_SYSTEM, *messages]) or "")
        for messages in conversations
        if _render(tokenizer, messages) is not None
    )


def refuses_late_system(tokenizer: HFTokenizer) -> bool:
    before, last = [_user(ASKED), _NEXT[0]], _user(ASKED)
    if _render(tokenizer, [*before, last]) is None:
        return False
    return _render(tokenizer, [*before, _SYSTEM, last]) is None


def shows_tool_media(tokenizer: HFTokenizer, image: str) -> bool:
    """Whether an image in a tool result is written as `image`, like one in a user message."""
    parts = [{"type": "text", "text": PARTS[0]}, {"type": "image"}]
    text = _render(tokenizer, _conversation(_turn(1), results=(parts, "")))
    return bool(image) and (text or "").count(image) == 1


def _render(tokenizer: HFTokenizer, messages: Sequence[Message]) -> str | None:
    fitted = fit_messages(messages, tokenizer.form)
    return try_render(lambda: tokenizer.apply_template(fitted, [], {}, probe=True))
