"""White space that a chat template writes between the parts of an assistant's turn:

    {turn_open}OPENER{thought_open}THOUGHT{thought_close}CLOSER{answer_open}ANSWER{before_call}CALL

The white space at each place in lower case is a joint. The texts for the client omit the joints and
keep all other white space, so that the next prompt repeats tokens of which the KV is stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from ...isolation import Fault, attempt
from ...records import ReasoningParser, ToolParser

THOUGHT, ANSWER = "xTHOUGHTx", "xANSWERx"  # texts of the turn that is rendered
PAD = " "
"""Tests whether a template keeps white space of the texts. Many templates remove only line ends."""
Render = Callable[[list[dict[str, Any]]], str]  # from messages to a prompt; may raise any error


@dataclass(frozen=True)
class TurnLayout:
    """The joints of a template. `None`: unknown, or the template removes all white space there."""

    thought_open: str | None = None
    thought_close: str | None = None
    answer_open: str | None = None
    before_call: str | None = None
    turn_open: str | None = None

    def after(self, prompt: str, openers: Sequence[str], *, begins: bool = True) -> TurnLayout:
        """The layout of a reply to `prompt`, which may have opened the thought and written a part
        of `thought_open`. `begins`: false if the prompt ends within the assistant's turn."""
        if not begins:
            return replace(self, turn_open=None)
        if self.thought_open is None or not prompt.rstrip().endswith(tuple(openers)):
            return self
        written = prompt[len(prompt.rstrip()) :]
        agrees = self.thought_open.startswith(written)
        return replace(self, thought_open=self.thought_open[len(written) :] if agrees else None)


NO_LAYOUT = TurnLayout()


def after_joint(space: str, joint: str | None) -> str:
    """The white space behind `joint`, which is text; empty if `space` does not begin with it."""
    return "" if joint is None or not space.startswith(joint) else space[len(joint) :]


def before_joint(space: str, joint: str | None) -> str:
    """The white space before `joint`, which is text; empty if `space` does not end with it."""
    return "" if joint is None or not space.endswith(joint) else space[: len(space) - len(joint)]


def layout_of(
    render: Render, thoughts: ReasoningParser | None, calls: ToolParser | None
) -> TurnLayout:
    """The joints of the template behind `render`, found by rendering a turn with these formats of
    thoughts and calls. Raises nothing: if `render` fails, they are unknown."""
    inside = _measure(lambda pad: _joints(render(_turns(pad)), thoughts, calls))
    before = _measure(lambda pad: TurnLayout(turn_open=_turn_open(render, pad)))
    return replace(inside, turn_open=before.turn_open)


def _measure(find: Callable[[str], TurnLayout]) -> TurnLayout:
    """The joints that `find` finds both with and without `PAD` around each text."""
    plain, padded = (attempt(partial(find, pad)) for pad in ("", PAD))
    if isinstance(plain, Fault) or isinstance(padded, Fault):
        return NO_LAYOUT
    names = [field.name for field in fields(TurnLayout)]
    pairs = {name: (getattr(plain, name), getattr(padded, name)) for name in names}
    return TurnLayout(**{name: _exact(name, *pair) for name, pair in pairs.items()})


def _turn_open(render: Render, pad: str) -> str | None:
    """`None` if there is more than white space."""
    asked = {"role": "user", "content": "x"}
    prompt = render([asked])
    whole = render([asked, {"role": "assistant", "content": f"{pad}{ANSWER}{pad}"}, asked])
    space, answer, _ = whole[len(prompt) :].partition(ANSWER)
    return space if whole.startswith(prompt) and answer and not space.strip() else None


def _turns(pad: str) -> list[dict[str, Any]]:
    call = {"id": "callprobe", "type": "function", "function": {"name": "f", "arguments": {}}}
    return [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": f"{pad}{ANSWER}{pad}",
            "reasoning_content": f"{pad}{THOUGHT}{pad}",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "x", "name": "f", "tool_call_id": "callprobe"},
    ]


def _joints(text: str, thoughts: ReasoningParser | None, calls: ToolParser | None) -> TurnLayout:
    openers = thoughts.openers() if thoughts else ()
    closers = thoughts.closers() if thoughts else ()
    blocks = (*calls.openers(), *calls.first) if calls else ()
    return TurnLayout(
        thought_open=_between(text, openers, (THOUGHT,)),
        thought_close=_between(text, (THOUGHT,), closers),
        answer_open=_between(text, closers, (ANSWER,)),
        before_call=_between(text, (ANSWER,), blocks),
    )


def _between(text: str, left: Sequence[str], right: Sequence[str]) -> str | None:
    if not left or not right:
        return None
    before, after = ("|".join(map(re.escape, words)) for words in (left, right))
    found = re.search(rf"(?:{before})(\s*)(?:{after})", text)
    return found[1] if found else None


def _exact(name: str, plain: str | None, padded: str | None) -> str | None:
    """`plain`, if the template adds it to the white space of the text."""
    if plain is None:
        return None
    expected = plain + PAD if name.endswith("_open") else PAD + plain  # the text is on that side
    return plain if padded == expected else None


class AnswerEdge:
    """Passes an answer on, but holds back white space at its end until the next part is known: more
    answer (`push`), a call (`call`) or the end (`finish`). Each returns the text that is now known.
    Before more answer or the end, the white space is text. Before a call, only the part before the
    joint is; if an answer follows after all, the rest is text, too."""

    def __init__(self, joint: str | None) -> None:
        self._joint = joint
        self._space = ""
        self._called = False

    def push(self, text: str) -> str:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._called = self._called and not shown
        return shown

    def call(self) -> str:
        kept = "" if self._called else before_joint(self._space, self._joint)
        self._space, self._called = self._space[len(kept) :], True
        return kept

    def finish(self) -> str:
        space, self._space = self._space, ""
        return "" if self._called else space

    @property
    def waiting(self) -> int:
        """Characters that are held back; 0 after a call."""
        return 0 if self._called else len(self._space)
