"""The form in which a chat template takes messages and tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TemplateForm:
    """What a chat template demands; `families.tokenizer.template_probe` finds it by rendering.

    The defaults fit most templates.
    """

    empty_content: Literal["null", "empty", "absent"] = "null"
    """`content` of a turn that only calls tools."""
    arguments: Literal["mapping", "text"] = "mapping"
    """Arguments of a call: an object, or its JSON text."""
    short_ids: bool = False
    """Call ids must be nine letters and digits."""
    named_ids: bool = False
    """Only the id of a call tells its name: `functions.NAME:INDEX`, where `INDEX` counts the calls
    of the conversation."""
    text_with_calls: Literal["together", "apart", "dropped"] = "together"
    """A turn can have text and calls; `apart`: the text is a separate turn before the calls;
    `dropped`: the template does not show it."""
    parallel_calls: bool = True
    """A turn can have several calls; if not, each is a turn with its result."""
    user_after_result: bool = True
    """A user's message can follow a result; if not, its text is added to the result."""
    lone_system: bool = True
    """A system message can be the only message; if not, it becomes the user's."""
    thought_with_text: bool = True
    """A turn with calls can have thoughts and text; if not, the thoughts begin the text."""
    thought_with_calls: bool = False
    """Where the text is a separate turn: thoughts belong to the turn with the calls."""
    text_parts: frozenset[str] = frozenset()
    """Roles whose text can have several parts; for others the parts are joined."""
    parts_only: bool = False
    """Only text in parts reaches the prompt, not a string."""
    takes_calls: bool = True
    """Calls and results reach the prompt; if not, they are written as text."""
    shows_tools: Literal["always", "with_system", "never"] = "always"
    """When tools reach the prompt; `with_system`: only with a system message. If they do not, a
    system message describes them."""
    tool_fields: frozenset[str] = frozenset()
    """Fields that every tool must have: `description`, `parameters`, `properties` for the
    description of each parameter, `additionalProperties` for that keyword of each object."""
    type_lists: bool = True
    """A parameter's `type` can be a list."""
