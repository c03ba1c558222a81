"""What a scripted model answers to a conversation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from .formats import RESULT, TOOLS, Format
from .script import BadScript, Step, script, steps_in, without_script

SUMMARY_WANTED = (
    "CRITICAL: Respond with TEXT ONLY",
    "CONTEXT CHECKPOINT",
    "handoff summary",
    "state_snapshot",
    "detailed summary",
    "continuing our conversation",
    "anchored summary",
    "structured context checkpoint summary",
    "context checkpoint",
    "Summarize the conversation",
)
"""Words by which coding agents ask for a summary, to make room in their context."""
SUMMARISER = re.compile(r"\bsummari[sz]", re.IGNORECASE)
"""In the system prompt of a request without tools, whose only purpose is a summary."""
TITLE_WANTED = re.compile(r'(?<!")\btitles?\b(?!")', re.IGNORECASE)
"""In a system prompt; a JSON schema has it in quotes."""


@dataclass(frozen=True)
class Turn:
    role: str
    text: str

    @property
    def is_result(self) -> bool:
        return self.text.startswith(RESULT)


@dataclass(frozen=True)
class Reply:
    text: str
    bare: tuple[str, ...] = ()
    """The rest of it where a grammar permits neither text beside calls nor thoughts."""
    slow: float = 0.0
    """Seconds for each token."""
    prefill: float = 0.0
    """Seconds for the prompt before it."""
    since: float = 0.0


@dataclass(frozen=True)
class Playing:
    steps: tuple[Step, ...]
    done: int

    @property
    def rest(self) -> tuple[Step, ...]:
        return self.steps[self.done :]


def reply_to(turns: Sequence[Turn], calls: Format) -> Reply:
    """For an unreadable script, the error."""
    try:
        playing = _playing(turns)
    except BadScript as error:
        return Reply(f"Bad script: {error}")
    if _summary_wanted(turns):
        return Reply(_summary(playing))
    if _title_wanted(turns):
        return Reply('{"title": "A scripted title"}')
    if playing is None:
        return Reply(f"You said: {_asked(turns)[-80:]}")
    if not playing.rest:
        return Reply(f"All {playing.done} steps are done. The last result: {_last_result(turns)}")
    return _acted(playing.rest[0], calls)


def _acted(step: Step, calls: Format) -> Reply:
    thought = f"<think>\n{step.think}\n</think>\n\n" if step.think else ""
    made = calls.calls(step.calls)
    text = thought + "\n".join(filter(None, [step.text, made]))
    return Reply(text, (thought + made, made) if made else (), step.slow, step.prefill, step.since)


def _playing(turns: Sequence[Turn]) -> Playing | None:
    for at, turn in reversed(list(enumerate(turns))):
        found = None if turn.is_result or turn.role == "system" else steps_in(turn.text)
        if found is not None:
            return Playing(found, _answered(found, _quoted(found, turn.text), turns[at + 1 :]))
    return None


def _answered(steps: Sequence[Step], done: int, turns: Sequence[Turn]) -> int:
    """Number of answered steps; `done`: those before `turns`. The words or calls of a step identify
    it. Other texts of the assistant (its thanks for a summary, what a client keeps of earlier
    turns) are not steps."""
    for turn in turns:
        done += turn.role == "assistant" and (done >= len(steps) or _is(turn, steps[done]))
    return done


def _is(turn: Turn, step: Step) -> bool:
    called = bool(step.calls) and all(call.name in turn.text for call in step.calls)
    return called or step.say in turn.text


def _quoted(steps: Sequence[Step], text: str) -> int:
    """Steps in a conversation which one message quotes as a whole."""
    around = without_script(text)
    return sum(1 for _ in takewhile(lambda step: step.say and step.say in around, steps))


def _summary_wanted(turns: Sequence[Turn]) -> bool:
    asked = without_script(turns[-1].text) if turns and not turns[-1].is_result else ""
    if any(words in asked for words in SUMMARY_WANTED):
        return True
    system = _system(turns)
    return TOOLS not in system and bool(SUMMARISER.search(system))


def _summary(playing: Playing | None) -> str:
    rest = script(*playing.rest) if playing else "Nothing."
    return f"<summary>\nThe steps so far are done. What is left: {rest}\n</summary>"


def _title_wanted(turns: Sequence[Turn]) -> bool:
    system = _system(turns)
    return bool(TITLE_WANTED.search(system)) and TOOLS not in system


def _system(turns: Sequence[Turn]) -> str:
    return turns[0].text if turns and turns[0].role == "system" else ""


def _asked(turns: Sequence[Turn]) -> str:
    return next((t.text for t in reversed(turns) if t.role == "user" and not t.is_result), "")


def _last_result(turns: Sequence[Turn]) -> str:
    results = (turn.text for turn in reversed(turns) if turn.is_result)
    text = next(results, "none").removeprefix(RESULT)
    return text.removesuffix("\n</tool_response>")[-300:]
