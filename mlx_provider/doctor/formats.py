"""A checkpoint's formats by its tokenizer and template, without its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..chat.messages.normalise import normalise
from ..chat.messages.tools_as_text import (
    described_tools,
    fold_tools,
    has_tools,
    lacks_tools,
)
from ..families.tokenizer import HFTokenizer, load_tokenizer
from ..families.tokenizer.template_fit import fit_messages, fit_tools
from ..families.tokenizer.template_probe import has_system_role, refuses_late_system, wants_turns
from ..records import LoadOptions, ReasoningParser, ToolParser
from ..registry import PluginRegistry

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Shown:
    text: str
    folded: bool = False
    """Calls and results are written as text, because the template refuses them."""
    described: str = ""
    """System message with the tools, if the template does not show them."""


@dataclass(frozen=True)
class Formats:
    tokenizer: HFTokenizer
    tool_parser: ToolParser | None
    reasoning_parser: ReasoningParser | None
    any_parser: ToolParser | None
    """Used if the template shows no known format."""
    forced_parser: ToolParser | None
    """The format of calls that it is forced to write then."""

    @property
    def template(self) -> str | None:
        return self.tokenizer.chat_template

    def shown(self, messages: Messages, tools: Messages = (), **variables: Any) -> Shown:
        """Renders as for a request. Raises `BadRequest` if the template refuses the messages."""
        form, parser = self.tokenizer.form, self.tool_parser or self.forced_parser
        summary = described_tools(tools, parser) if tools and lacks_tools(form, messages) else ""
        found = normalise(
            messages,
            hoist_system=refuses_late_system(self.tokenizer),
            system_role=has_system_role(self.tokenizer),
            alternate=wants_turns(self.tokenizer),
            text_parts=form.text_parts,
            about_tools=summary,
        ).messages
        folds = has_tools(found) and not form.takes_calls
        if folds:
            found = fold_tools(found, parser, tools)
        hidden, text = self.tokenizer.rendered(
            fit_messages(found, form), [] if summary else fit_tools(tools, form), variables
        )
        return Shown(hidden.reveal(text), folds, summary)


def formats_of(folder: Path, registry: PluginRegistry) -> Formats:
    """Raises the errors of loading the tokenizer."""
    tokenizer = load_tokenizer(folder, LoadOptions())
    template = tokenizer.chat_template or ""
    return Formats(
        tokenizer,
        registry.detect_tool_parser(template),
        registry.detect_reasoning_parser(template),
        registry.fallback_tool_parser("read"),
        registry.fallback_tool_parser("write"),
    )
