"""Renders chat templates in a limited process."""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ...bounded_process import BoundedProcesses, ProcessEnded
from ...errors import BadRequest, RequestFailed, UnsupportedModel, for_another

SECONDS = 4.0
"""Processor time for one rendering, or for all probes of a template. A prompt of 100,000 tokens
takes a few milliseconds."""
CHARACTERS = 4_000_000
"""Characters that a template may write besides its input."""
TIMES = 4
"""Number of times that a template may write its input."""
MEMORY = 2 << 30
REMEMBERED = 100_000
"""Most characters of a probe's text that is kept for the next load."""
PROGRAM = Path(__file__).with_name("template_process.py")


class TemplateLimit(UnsupportedModel):
    """The template exceeds a limit on time, memory or output. No other input would help."""


@cache
def _processes() -> BoundedProcesses:
    """Shared by all models of this process, because a template leaves no state behind."""
    return BoundedProcesses(PROGRAM, MEMORY)


def try_render(render: Callable[[], str]) -> str | None:
    """`None`: the template refuses this input. Raises `TemplateLimit`, after which no other input
    is tried."""
    try:
        return render()
    except TemplateLimit:
        raise
    except BadRequest:
        return None


class _Probes:
    """Within `SECONDS` of processor time in total. The same question is asked once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = SECONDS
        self._refused: TemplateLimit | None = None
        self._answers: dict[bytes, dict[str, Any]] = {}

    def answer(self, key: bytes, ask: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
        with self._lock:
            if self._refused is not None:
                raise for_another(self._refused)
            if key in self._answers:
                return self._answers[key]
            try:
                answer = ask(self._left)
            except TemplateLimit as error:
                self._refused = error
                raise
            self._left -= answer["spent"]
            if self._left <= 0:
                self._refused = _limit_error("it takes too much processor time")
            if len(answer.get("text", "")) <= REMEMBERED:
                self._answers[key] = answer
            return answer


@lru_cache(maxsize=4)
def _probes_of(source: str) -> _Probes:
    """Shared by all loads of models with this template."""
    return _Probes()


@dataclass(frozen=True)
class TemplateRenderer:
    """Safe from any thread. `special_tokens`: variables such as `bos_token`."""

    source: str
    special_tokens: Mapping[str, Any]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        generation_prompt: bool,
        probe: bool = False,
    ) -> str:
        """Raises `BadRequest` with the template's message and its line, and `TemplateLimit`. Keys
        with the value None reach the template. All probes of a template share
        `SECONDS`."""
        given = _json({"messages": messages, "tools": tools})
        asked = {
            "messages": messages,
            "tools": tools,
            "variables": dict(sorted({**self.special_tokens, **variables}.items())),
            "generation_prompt": generation_prompt,
            "characters": CHARACTERS + TIMES * len(given),
        }

        def ask(seconds: float) -> dict[str, Any]:
            return self._answer({**asked, "seconds": seconds})

        if probe:
            answer = _probes_of(self.source).answer(hashlib.sha256(_json(asked)).digest(), ask)
        else:
            answer = ask(SECONDS)
        if "text" in answer:
            return str(answer["text"])
        raise BadRequest(
            f"the model's chat template refuses these messages: {answer['error']}{_line(answer)}",
            param="messages",
        )

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        key = hashlib.sha256(self.source.encode("utf-8", "surrogatepass")).hexdigest()
        setup = _json({"template": key, "source": self.source, "seconds": SECONDS})
        try:
            answer: dict[str, Any] = json.loads(
                _processes().ask(_json({**asked, "template": key}), {key: setup})
            )
        except ProcessEnded as error:
            if not error.reason:
                raise RequestFailed(f"the process that renders chat templates {error}") from None
            raise _limit_error(error.reason) from None
        except OSError as error:
            reason = f"the process that renders chat templates does not start: {error}"
            raise RequestFailed(reason) from None
        if answer.get("limit"):
            raise _limit_error(f"{answer['error']}{_line(answer)}")
        return answer


def _line(answer: Mapping[str, Any]) -> str:
    return f" (line {answer['line']} of the template)" if answer.get("line") else ""


def _limit_error(reason: str) -> TemplateLimit:
    remedy = "put its maker's chat_template.jinja beside the weights, or take another conversion"
    return TemplateLimit(f"the model's chat template is refused: {reason}; {remedy}", param="model")


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (RecursionError, TypeError, ValueError) as error:
        raise BadRequest(f"the messages cannot be rendered: {error}", param="messages") from None
