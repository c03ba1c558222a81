"""Message normalisation: what clients send, in the one form that chat templates take. `normalise`
is pure and idempotent, and drops no text but Claude Code's billing line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from ...errors import wrong_part
from .parts import MediaRef, Part, canonical_calls, check_arguments, content_parts, reasoning_text
from .turns import BLANK_LINE, Turn, join, place_results

ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool", "function": "tool",
}  # fmt: skip

# Claude Code's first system line changes with the first user message and would prevent sessions
# from sharing a prompt prefix.
_BILLING = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")


@dataclass(frozen=True)
class Normalised:
    """`messages[i]["content"]` is a string, `None` (an assistant turn that only calls tools), or,
    with media or separate parts, a list of `{"type": "text", "text": ...}`, `{"type": "image"}` and
    `{"type": "video"}`. `media` is in the order of those parts."""

    messages: list[dict[str, Any]]
    media: tuple[MediaRef, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class MediaSupport:
    """The kinds of media that a model takes, and why a part (by its path) cannot be read."""

    kinds: frozenset[str]
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def text(self, part: MediaRef) -> str | None:
        """The text in place of the part; `None`: the model gets the part itself."""
        if part.kind not in self.kinds:
            return f"[{part.kind} omitted: this model cannot take it]"
        reason = self.unreadable.get(part.path)
        return reason and f"[{part.kind}: {reason}, not shown]"


def normalise(
    messages: Sequence[Mapping[str, Any]],
    *,
    hoist_system: bool,
    system_role: bool = True,
    alternate: bool = False,
    tool_media: bool = False,
    support: MediaSupport | None = None,
    text_parts: frozenset[str] = frozenset(),
    about_tools: str = "",
) -> Normalised:
    """`hoist_system`: the template refuses a system message after the first, so every one moves to
    the front; otherwise a later one becomes user text in its place, and the cached prompt prefix
    stays valid. `system_role`: the template shows system messages; otherwise they begin the first
    user message. `alternate`: the template wants user and assistant to alternate, the user first,
    so turns with media are merged, too. `tool_media`: the template shows images inside tool
    results; otherwise they move to a user turn after the results. `support`: media for the model;
    `None`: all. `text_parts`: roles whose parts of text stay separate; those of others are joined
    by a blank line. `about_tools`: a system message after the client's own leading ones.

    Raises `BadRequest` that names the wrong part. A part that no model can take becomes text, but
    is wrong in a system message and in the message of `typed_index`."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise wrong_part("messages", "must be a list of messages")
    if not messages:
        raise wrong_part("messages", "is empty; send at least one message")
    check_arguments(messages)
    notes: list[str] = []
    typed = typed_index(messages)
    read = (
        _read(m, f"messages[{i}]", None if i == typed else notes) for i, m in enumerate(messages)
    )
    turns = [turn for turn in read if turn]
    if not turns:
        raise wrong_part("messages", "holds no text; send at least one message")
    if about_tools:
        at = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
        turns.insert(at, Turn("system", (about_tools,)))
    turns, warnings = place_results(turns)
    warnings = notes + warnings
    if support is not None:
        turns, omitted = _replace_media(turns, support)
        warnings += omitted
    if not tool_media:
        turns = _move_tool_media(turns)
    placed = _place_system(turns, hoist_system)
    merged = _merge(placed if system_role else _without_system(placed), alternate)
    if alternate:
        merged = _user_first(merged)
    media = tuple(p for turn in merged for p in turn.parts if isinstance(p, MediaRef))
    return Normalised([_write(turn, text_parts) for turn in merged], media, tuple(warnings))


def _replace_media(
    turns: Sequence[Turn], support: MediaSupport
) -> tuple[list[Turn], tuple[str, ...]]:
    """The turns with text for media that the model does not get, and warnings. Images stay in an
    agent's history, so an error would end its session."""
    parts = [part for turn in turns for part in turn.parts]
    omitted = [p for p in parts if isinstance(p, MediaRef) and p.kind not in support.kinds]
    replaced = [replace(turn, parts=tuple(_replace_parts(turn.parts, support))) for turn in turns]
    warnings = [f"{p.path}: {p.kind} omitted, this model cannot take it" for p in omitted]
    return replaced, tuple(warnings)


def _replace_parts(parts: Sequence[Part], support: MediaSupport) -> list[Part]:
    """A text in place of media is joined with the texts before and after it."""
    replaced: list[Part] = []
    joins = False
    for part in parts:
        omitted = support.text(part) if isinstance(part, MediaRef) else None
        new = part if omitted is None else omitted
        joins |= omitted is not None
        if joins and replaced and isinstance(replaced[-1], str) and isinstance(new, str):
            replaced[-1] += BLANK_LINE + new
        else:
            replaced.append(new)
        joins = omitted is not None
    return replaced


def typed_index(messages: Sequence[Any]) -> int | None:
    """Index of the last message, if it is a user's and follows no tool result; otherwise `None`. In
    this message the user can correct an error; an agent sends others again with each request."""
    roles = [m.get("role") if isinstance(m, Mapping) else None for m in messages[-2:]]
    typed = roles[-1] == "user" and roles[0] not in ("tool", "function")
    return len(messages) - 1 if typed else None


def _read(message: Mapping[str, Any], path: str, notes: list[str] | None) -> Turn | None:
    """`notes`: see `content_parts`. `None`: the message has only the billing line."""
    if not isinstance(message, Mapping):
        raise wrong_part(path, "must be an object with `role` and `content`")
    role = ROLES.get(message["role"]) if isinstance(message.get("role"), str) else None
    if role is None:
        known = f"it must be one of {', '.join(ROLES)}"
        raise wrong_part(f"{path}.role", f"is {message.get('role')!r}; {known}")
    notes = None if role == "system" else notes
    parts = content_parts(message, path, notes)
    if role == "system":
        kept = _without_billing(parts)
        if parts and not kept:
            return None
        parts = kept
    calls = canonical_calls(message, path) if role == "assistant" else ()
    return Turn(
        role=role,
        parts=parts,
        null=not parts and bool(calls),
        name=_optional_text(message, "name", path),
        calls=calls,
        call_id=_optional_text(message, "tool_call_id", path) if role == "tool" else None,
        reasoning=reasoning_text(message) if role == "assistant" else "",
        path=path,
    )


def _optional_text(message: Mapping[str, Any], key: str, path: str) -> str | None:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise wrong_part(f"{path}.{key}", "must be a string")
    return value


def _without_billing(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    kept = tuple(_BILLING.sub("", part) if isinstance(part, str) else part for part in parts)
    return parts if kept == parts else tuple(part for part in kept if part != "")


def _place_system(turns: list[Turn], hoist: bool) -> list[Turn]:
    first = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    head, rest = turns[:first], turns[first:]
    if hoist:
        head += [turn for turn in rest if turn.role == "system"]
        rest = [turn for turn in rest if turn.role != "system"]
    else:
        rest = [replace(t, role="user") if t.role == "system" else t for t in rest]
    return ([reduce(join, head)] if head else []) + rest


def _without_system(turns: list[Turn]) -> list[Turn]:
    if turns[0].role != "system":
        return turns
    head, *rest = replace(turns[0], role="user"), *turns[1:]
    together = bool(rest) and rest[0].role == "user"
    return [join(head, rest[0]), *rest[1:]] if together else [head, *rest]


def _user_first(turns: list[Turn]) -> list[Turn]:
    at = 1 if turns[0].role == "system" else 0
    roles = [turn.role for turn in turns[at:]]
    if roles[:1] == ["assistant"] and "user" in roles:
        return [*turns[:at], Turn("user", ("",)), *turns[at:]]
    return turns


def _move_tool_media(turns: list[Turn]) -> list[Turn]:
    out: list[Turn] = []
    moved: list[Part] = []
    for turn in turns:
        if turn.role != "tool" and moved:
            out.append(Turn("user", tuple(moved)))
            moved = []
        media = [part for part in turn.parts if isinstance(part, MediaRef)]
        if turn.role != "tool" or not media:
            out.append(turn)
            continue
        moved += [f"Attached to the tool result {turn.call_id or turn.name or ''}".rstrip(), *media]
        texts = tuple(part for part in turn.parts if isinstance(part, str))
        out.append(replace(turn, parts=texts or (f"[{media[0].kind} in the next message]",)))
    return [*out, Turn("user", tuple(moved))] if moved else out


def _merge(turns: list[Turn], alternate: bool) -> list[Turn]:
    out: list[Turn] = []
    for turn in turns:
        if out and _mergeable(out[-1], turn, alternate):
            out[-1] = join(out[-1], turn)
        else:
            out.append(turn)
    return out


def _mergeable(first: Turn, second: Turn, alternate: bool) -> bool:
    if first.role != second.role or first.role not in ("user", "assistant") or first.calls:
        return False
    if alternate:
        return True
    named = second.name not in (None, first.name)
    return first.plain and second.plain and not second.calls and not named


def _write(turn: Turn, text_parts: frozenset[str]) -> dict[str, Any]:
    content = _content(turn, separate=turn.role in text_parts and len(turn.parts) > 1)
    message: dict[str, Any] = {"role": turn.role, "content": content}
    if turn.name is not None:
        message["name"] = turn.name
    if turn.call_id is not None:
        message["tool_call_id"] = turn.call_id
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = list(turn.calls)
    return message


def _content(turn: Turn, *, separate: bool) -> str | list[dict[str, Any]] | None:
    if turn.null:
        return None
    if turn.plain and not separate:
        return turn.text
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
        for part in turn.parts
    ]
