"""Checks texts in the records of plugins, which are used in searches of replies and in grammars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ..errors import PluginError
from ..records import (
    CallGrammar,
    Client,
    Drafter,
    Kernels,
    MessageGrammar,
    ReasoningParser,
    TaggedArguments,
    ToolParser,
    UpstreamPatch,
)

Part = CallGrammar | MessageGrammar | TaggedArguments

PARTS: dict[object, type[Part]] = {
    "CallGrammar | None": CallGrammar,
    "MessageGrammar | None": MessageGrammar,
    "TaggedArguments | None": TaggedArguments,
}
"""Records within records, by the annotation of the field."""


def _text(value: object) -> bool:
    return isinstance(value, str)


def _texts(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_text, value))


def _pair(value: Any) -> bool:
    return _texts(value) and len(value) == 2


TEXTS: dict[object, tuple[Callable[[object], bool], str]] = {
    "str": (_text, "text"),
    "str | None": (lambda value: value is None or _text(value), "text or None"),
    "tuple[str, ...]": (_texts, "a tuple of texts"),
    "tuple[str, str] | None": (lambda value: value is None or _pair(value), "two texts or None"),
}
"""Allowed content of a field, with its description."""


def check_texts(
    record: ToolParser | ReasoningParser | Kernels | Drafter | Client | UpstreamPatch | Part,
    where: str,
) -> None:
    """Raise `PluginError` for a field that is not text, because it would fail during a reply."""
    for field in fields(record):
        value = getattr(record, field.name)
        if field.type in PARTS and value is not None:
            kind = PARTS[field.type]
            if not isinstance(value, kind):
                raise PluginError(f"{where}{field.name} is not a {kind.__name__}")
            check_texts(value, f"{where}{field.name}.")
        elif field.type in TEXTS:
            fits, wanted = TEXTS[field.type]
            if not fits(value):
                raise PluginError(f"{where}{field.name} is not {wanted}")
    if isinstance(record, CallGrammar) and "{name}" not in record.before:
        raise PluginError(f"{where}before does not hold {{name}}, the place of the tool's name")
