"""Chat templates, rendered in a bounded process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...bounded_process import BoundedProcesses, ProcessEnded
from ...errors import BadRequest, RequestFailed, UnsupportedModel

SECONDS = 4.0
"""Processor time for one rendering; a prompt of 100,000 tokens takes some milliseconds."""
CHARACTERS = 4_000_000
"""That a template may write beside what it is given ..."""
TIMES = 4
"""... and how often it may write all of that."""
PROGRAM = Path(__file__).with_name("template_process.py")


class TemplateLimit(UnsupportedModel):
    """The template exceeds a bound on time, memory or output: no other input would mend that."""


@cache
def _processes() -> BoundedProcesses:
    """Shared by all models of this process: a template leaves nothing behind for another."""
    return BoundedProcesses(PROGRAM)


@dataclass(frozen=True)
class TemplateRenderer:
    """One chat template; safe from any thread.

    `special_tokens`: variables `bos_token` and the like.
    """

    source: str
    special_tokens: Mapping[str, Any]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        generation_prompt: bool,
    ) -> str:
        """The text of a conversation; keys whose value is None reach the template.

        Raises `BadRequest` with the template's complaint and its line, `TemplateLimit`.
        """
        given = _json({"messages": messages, "tools": tools})
        key = hashlib.sha256(self.source.encode("utf-8", "surrogatepass")).hexdigest()
        setup = _json({"template": key, "source": self.source, "seconds": SECONDS})
        asked = {
            "template": key,
            "messages": messages,
            "tools": tools,
            "variables": {**self.special_tokens, **variables},
            "generation_prompt": generation_prompt,
            "seconds": SECONDS,
            "characters": CHARACTERS + TIMES * len(given),
        }
        try:
            answer = json.loads(_processes().ask(_json(asked), {key: setup}))
        except ProcessEnded as error:
            if not error.reason:
                raise RequestFailed(f"the process that renders chat templates {error}") from None
            raise _refused(error.reason) from None
        except OSError as error:
            reason = f"the process that renders chat templates does not start: {error}"
            raise RequestFailed(reason) from None
        if "text" in answer:
            return str(answer["text"])
        line = f" (line {answer['line']} of the template)" if answer.get("line") else ""
        if answer.get("limit"):
            raise _refused(f"{answer['error']}{line}")
        raise BadRequest(
            f"the model's chat template refuses these messages: {answer['error']}{line}",
            param="messages",
        )


def _refused(reason: str) -> TemplateLimit:
    remedy = "put its maker's chat_template.jinja beside the weights, or take another conversion"
    return TemplateLimit(f"the model's chat template is refused: {reason}; {remedy}", param="model")


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (RecursionError, TypeError, ValueError) as error:
        raise BadRequest(f"the messages cannot be rendered: {error}", param="messages") from None
