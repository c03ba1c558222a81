"""Finds by short conversations which messages, tools and calls a chat template takes, and in which
form. minja probes the same demands (`chat-template.hpp`)."""

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
Probe = Callable[..., str | None]
"""(messages, form, tools) -> the prompt. `None`: the template refuses them."""

# Words of the probe's messages and tool. No template has them, so they show what it renders.
NAME, ABOUT, KEY = "find_zyzzyva", "xWEEVILx", "leaf"
ASKED, SAID, THOUGHT, ANSWERED, AGAIN = "xASKx", "xSAYx", "xTHINKx", "xANSWERx", "xAGAINx"
ADDED = "xADDx"
VALUES, RESULTS = ("xLEAFx", "xBARKx"), ("xRESULTx", "xOUTCOMEx")
PARTS = ("xPARTx", "xPIECEx")
IDS = ("call_24f5c1e07a9b4d31", "call_9be07c6612a84cf3")
LEAF = {"type": "string", "description": "The leaf."}
TOOL: Message = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": ABOUT,
        "parameters": {"type": "object", "properties": {KEY: LEAF}, "required": [KEY]},
    },
}


def _user(text: Any) -> Message:
    return {"role": "user", "content": text}


_SYSTEM: Message = {"role": "system", "content": SAID}
_NEXT: list[Message] = [{"role": "assistant", "content": ANSWERED}, _user(AGAIN)]


def template_form(render: Render) -> TemplateForm:
    """What the template behind `render` demands. Raises the errors of `render`, including
    `TemplateLimit`, except for `BadRequest`, by which a template refuses one form."""

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
    """Render the probes, on any thread. Raises `UnsupportedModel` for a template that exceeds its
    limits, so that the load on the engine thread does not wait for such a template."""
    render = TemplateRenderer(source, {}).render
    template_form(partial(render, variables={}, generation_prompt=True, probe=True))


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


# the field of `TemplateForm.tool_fields` that each tool lacks
_INCOMPLETE = {
    "description": _tool(description=None),
    "parameters": _tool(parameters=None),
    "properties": _parameter(type="string"),
    "additionalProperties": _parameter(type="object", description=""),
}
_LISTED = _parameter(type=["string", "null"], description="")


def _with_calls(probe: Probe, form: TemplateForm) -> TemplateForm:
    """`form` with what calls demand. `takes_calls`: the template loses nothing of the turns."""
    tools = [TOOL] if form.shows_tools == "always" else []
    prompt = probe([_user(ASKED)], form, tools) or ""

    def arrives(
        form: TemplateForm, turn: Message, words: Sequence[str] = (), then: Sequence[Message] = ()
    ) -> bool:
        """Whether prompts that end with the turn, and that go on, have its data and `words`."""
        calls, asked = len(turn["tool_calls"]), [*_conversation(turn), *then]
        wanted = (*words, *VALUES[:calls], *RESULTS[:calls])
        texts = (probe(messages, form, tools) for messages in (asked, [*asked, *_NEXT]))
        return all(_has_all(text, prompt, wanted, calls) for text in texts)

    found = _call_form(probe, form, tools, prompt, arrives)
    if found is None:
        return replace(form, takes_calls=False)
    with_text, text = _turn(1, content=SAID), [SAID]
    if not arrives(found, with_text, text):
        found = replace(found, text_with_calls="apart")
        if not arrives(found, with_text, text):
            found, text = replace(found, text_with_calls="dropped"), []
    found = replace(found, parallel_calls=arrives(found, _turn(2)))
    with_thought = {**with_text, "reasoning_content": THOUGHT}
    found = replace(found, thought_with_text=arrives(found, with_thought, text))
    moved = replace(found, thought_with_calls=True)
    prompts = [probe(_conversation(with_thought), tried, tools) or "" for tried in (found, moved)]
    if THOUGHT not in prompts[0] and THOUGHT in prompts[1]:
        found = moved
    joined = replace(found, user_after_result=False)
    user_after = _turn(1), [ADDED], [_user(ADDED)]
    if not arrives(found, *user_after) and arrives(joined, *user_after):
        found = joined
    works = arrives(found, _turn(2)) and arrives(found, with_thought, text)
    return found if works else replace(form, takes_calls=False)


def _call_form(
    probe: Probe,
    form: TemplateForm,
    tools: Sequence[Message],
    prompt: str,
    arrives: Callable[[TemplateForm, Message], bool],
) -> TemplateForm | None:
    """The form in which a call arrives, if any. Preferred: one whose text begins with `prompt`, so
    that the prefix cache finds a reply's tokens again."""
    turn = _turn(1)
    fits = [variant for variant in _call_forms(form) if arrives(variant, turn)]
    for variant in fits:
        if (probe(_conversation(turn), variant, tools) or "").startswith(prompt):
            return variant
    return fits[0] if fits else None


def _call_forms(form: TemplateForm) -> Iterator[TemplateForm]:
    """`form` with every combination of ids, arguments and empty content, the most usual first."""
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
    pairs = zip(turn["tool_calls"], results, strict=False)  # results may be more than calls
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": x} for call, x in pairs]
    return [_user(ASKED), turn, *answers]


def called_once() -> list[Message]:
    """A question, one call and its result, as the probe renders them."""
    return _conversation(_turn(1))


def _has_all(text: str | None, prompt: str, words: Sequence[str], calls: int) -> bool:
    """Whether `text` has all words and calls, and no Python or doubly escaped data."""
    if text is None or any(word not in text for word in (ASKED, *words)):
        return False
    if text.count(NAME) < prompt.count(NAME) + calls:
        return False
    odd = ("None", f"'{KEY}'", f'\\"{KEY}')
    return all(text.count(word) <= prompt.count(word) for word in odd)


def _roles_in_parts(probe: Probe, form: TemplateForm) -> Iterator[str]:
    """Roles of which the template writes the text of two parts, and not the parts as data."""
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
        as_data = "'type'" in text or '"type"' in text
        if all(text.count(word) == 1 for word in PARTS) and not as_data:
            yield role


def dialect(tokenizer: HFTokenizer) -> dict[str, Any]:
    """Fields of `ModelInfo` that describe the required form of messages and tools. Raises
    `UnsupportedModel` for a template that exceeds its limits."""
    return {
        "template": tokenizer.form,
        "alternate": wants_turns(tokenizer),
        "system_role": has_system_role(tokenizer),
    }


def wants_turns(tokenizer: HFTokenizer) -> bool:
    """Whether the template refuses two messages in a row of the user, or of the assistant."""
    user, reply = _user(ASKED), _NEXT[0]
    pairs = [([user], [user, user]), ([user, reply, user], [user, reply, reply, user])]
    return any(
        _render(tokenizer, single) is not None and _render(tokenizer, doubled) is None
        for single, doubled in pairs
    )


def has_system_role(tokenizer: HFTokenizer) -> bool:
    """Whether the prompt has a system message, also if a tool result comes last. Some templates
    raise for it, others drop it or write it into the last message only if that is a user's."""
    conversations = [[_user(ASKED)]]
    if tokenizer.form.takes_calls:
        conversations.append(_conversation(_turn(1)))
    return all(
        SAID in (_render(tokenizer, [_SYSTEM, *messages]) or "")
        for messages in conversations
        if _render(tokenizer, messages) is not None
    )


def refuses_late_system(tokenizer: HFTokenizer) -> bool:
    """Whether the template refuses a system message after the first message."""
    before, last = [_user(ASKED), _NEXT[0]], _user(ASKED)
    if _render(tokenizer, [*before, last]) is None:
        return False
    return _render(tokenizer, [*before, _SYSTEM, last]) is None


def shows_tool_media(tokenizer: HFTokenizer, image: str) -> bool:
    """Whether the template writes an image in a tool result as `image`, as in a user message."""
    parts = [{"type": "text", "text": PARTS[0]}, {"type": "image"}]
    text = _render(tokenizer, _conversation(_turn(1), results=(parts, "")))
    return bool(image) and (text or "").count(image) == 1


def _render(tokenizer: HFTokenizer, messages: Sequence[Message]) -> str | None:
    fitted = fit_messages(messages, tokenizer.form)
    return try_render(lambda: tokenizer.apply_template(fitted, [], {}, probe=True))
