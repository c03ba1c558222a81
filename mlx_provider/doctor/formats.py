"""What a checkpoint's tokenizer and template say of its formats, without its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..chat.messages.fold import fold_tools, has_tools
from ..chat.messages.normalise import normalise
from ..errors import BadRequest
from ..families.tokenizer import HFTokenizer, load_tokenizer
from ..families.tokenizer.dialect import has_system_role, refuses_late_system, wants_turns
from ..records import LoadOptions, ReasoningParser, ToolParser
from ..registry import PluginRegistry

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Shown:
    """A rendered conversation."""

    text: str
    folded: bool = False
    """Tool messages were written as text, because the template refused them."""


@dataclass(frozen=True)
class Formats:
    """How a model's conversations are written and its replies read."""

    tokenizer: HFTokenizer
    tool_parser: ToolParser | None
    reasoning_parser: ReasoningParser | None
    any_parser: ToolParser | None
    """Reads calls where no known format is shown."""

    @property
    def template(self) -> str | None:
        return self.tokenizer.chat_template

    def shown(self, messages: Messages, tools: Messages = (), **variables: Any) -> Shown:
        """As a request's would be. Raises `BadRequest` where the template refuses them."""
        found = normalise(
            messages,
            hoist_system=refuses_late_system(self.tokenizer),
            system_role=has_system_role(self.tokenizer),
            alternate=wants_turns(self.tokenizer),
        ).messages
        try:
            return Shown(self._text(found, tools, variables))
        except BadRequest:
            if not has_tools(found):
                raise
        return Shown(self._text(fold_tools(found), tools, variables), folded=True)

    def _text(self, messages: Messages, tools: Messages, variables: Mapping[str, Any]) -> str:
        hidden, text = self.tokenizer.rendered(messages, tools, variables)
        return hidden.reveal(text)


def formats_of(folder: Path, registry: PluginRegistry) -> Formats:
    """Of a model folder. Raises what loading its tokenizer raises."""
    tokenizer = load_tokenizer(folder, LoadOptions())
    template = tokenizer.chat_template or ""
    return Formats(
        tokenizer,
        registry.detect_tool_parser(template),
        registry.detect_reasoning_parser(template),
        registry.fallback_tool_parser("read"),
    )
