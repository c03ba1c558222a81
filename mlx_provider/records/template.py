"""The form in which a chat template takes messages and tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TemplateForm:
    """What a chat template demands; `families.tokenizer.template_probe` finds it by rendering.

    The defaults are the form that most templates take.
    """

    empty_content: Literal["null", "empty", "absent"] = "null"
    """`content` of a turn that calls tools and says nothing."""
    arguments: Literal["mapping", "text"] = "mapping"
    """Arguments of a call: an object, or its JSON text."""
    short_ids: bool = False
    """Call ids are nine letters and digits; others raise."""
    text_with_calls: Literal["together", "apart", "dropped"] = "together"
    """A turn holds text and calls; `apart`: the text is a turn of its own before the calls;
    `dropped`: the template has no place for it."""
    parallel_calls: bool = True
    """A turn may hold several calls; otherwise each is a turn with its result."""
    user_after_result: bool = True
    """A user's message may follow a result; otherwise its text ends the result."""
    lone_system: bool = True
    """A system message may be all there is; otherwise it becomes the user's."""
    thought_with_text: bool = True
    """A turn with calls may hold thoughts and text; otherwise the thoughts begin the text."""
    text_parts: frozenset[str] = frozenset()
    """Roles whose text may come in several parts; for others the parts are joined."""
    parts_only: bool = False
    """Text reaches the prompt in parts alone, not as a string."""
    takes_calls: bool = True
    """Calls and results reach the prompt; otherwise they are written as text."""
    shows_tools: Literal["always", "with_system", "never"] = "always"
    """When tools reach the prompt: `with_system`, only beside a system message. Otherwise a system
    message describes them."""
    tool_fields: frozenset[str] = frozenset()
    """Fields that every tool must have: `description`, `parameters`, `properties` for the
    description of each parameter, `additionalProperties` for that keyword of each object."""
    type_lists: bool = True
    """A parameter's `type` may be a list."""
