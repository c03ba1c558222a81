"""Checks once, with a probe, whether a chat template writes hidden characters unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ....isolation import Isolation
from ....records import TemplateForm
from ..template_fit import fit_messages, fit_tools
from ..template_renderer import TemplateLimit
from .control_tokens import ControlTokens
from .marks import Hidden, hide, revealed, with_signs

DIGIT = "7"
"""Like a mark, it has no case and passes every escape."""


def keeps_marks(
    control: ControlTokens, taken: str, render: Callable[[Hidden], str], form: TemplateForm
) -> bool:
    """Whether every mark appears where a digit in its place would; also true for a template that
    refuses every probe, because a missing mark is detected in the request, too. Raises
    `TemplateLimit`."""
    for probe in _probes(control.texts, form):
        hidden = hide(control, probe, taken=taken)
        digits = dict.fromkeys(hidden.marks, DIGIT)
        plain = revealed(hidden, digits)
        with Isolation() as trying:  # a template may support neither tools nor a system part
            # twice, because a template may write the time
            return any(with_signs(render(hidden), digits) == render(plain) for _ in range(2))
        if trying.fault is not None and isinstance(trying.fault.error, TemplateLimit):
            raise trying.fault.error
    return True


def _probes(texts: list[str], form: TemplateForm) -> Iterator[Hidden]:
    for text in texts[:1]:
        turns = _turns(text, calls=True), _turns(text, calls=False), [_said(text)]
        tools: tuple[list[dict[str, Any]], ...] = fit_tools([_tool(text)], form), [], []
        for messages, shown in zip(turns, tools, strict=True):
            yield Hidden(fit_messages(messages, form), shown, {})


def _said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _turns(text: str, *, calls: bool) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": f"a {text} b"}}}
    called: list[dict[str, Any]] = [
        {"role": "assistant", "content": f"c {text}", "tool_calls": [call]},
        {"role": "tool", "content": f"d {text} e", "name": "look"},
    ]
    system: list[dict[str, Any]] = [{"role": "system", "content": f"f {text} g"}]
    return [
        *(system if calls else []),
        _said(f"h {text} i"),
        *(called if calls else []),
        {"role": "assistant", "content": f"j {text} k", "reasoning_content": f"l {text} m"},
        _said(f"n {text}"),
    ]


def _tool(text: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"at": {"type": "string", "description": text}}}
    function = {"name": "look", "description": f"o {text} p", "parameters": schema}
    return {"type": "function", "function": function}
