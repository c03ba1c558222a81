"""The passes of one reply as the engine runs them, and what they take on another device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from device_curves import HOST, Estimate
from mlx_provider.chat.output.reply import Reply
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.execution.decode_batch import Drafts
from mlx_provider.engine.request import Row
from mlx_provider.engine.scheduling.chunking import StepPlan
from mlx_provider.engine.speculation.speculation import Speculation
from mlx_provider.engine.speculation.step import DraftStep, Origin
from mlx_provider.engine.step.decode import Decode
from mlx_provider.protocol.events import Delta
from mlx_provider.records import ScoresPrompts
from replaced import Replaced, wrap
from speculation_curves import DRAFTERS


@dataclass(frozen=True)
class Pass:
    """A pass of the one row."""

    width: int
    """Tokens: drafts, and the one before them."""
    waited: bool
    """It was launched after the last one had been read."""
    guesses: int = 0
    """Drafts of a drafter,"""
    drafter: str = "lookup"
    """of this kind."""

    def seconds(self, device: Estimate, depth: int) -> float:
        """Time of the device behind so many cached tokens, with its wait for the host."""
        own = device.seconds(0, 0, self.width, depth)
        own += self.guesses * DRAFTERS[self.drafter].round(device)
        return own + HOST if self.waited else max(HOST, own)


@dataclass
class Passes:
    """Of a reply."""

    all: list[Pass] = field(default_factory=list)
    begun: int = 0
    """Passes up to the first byte of its call,"""
    read: int = 0
    """and to its end."""

    @property
    def waits(self) -> int:
        return sum(each.waited for each in self.all[: self.read])


@contextmanager
def watched(engine: Engine) -> Iterator[Passes]:
    """Of the reply that is written meanwhile."""
    passes = Passes()
    speculation = engine.drafting._speculation
    apart = False

    def caught_up(original: Callable[..., Any]) -> Callable[..., Any]:
        def catch_up(decode: Decode) -> Any:
            nonlocal apart
            apart = True
            try:
                return original(decode)
            finally:
                apart = False

        return catch_up

    def ran(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(decode: Decode, plan: StepPlan, drafts: Drafts, *, caught_up: bool) -> Any:
            decoded = original(decode, plan, drafts, caught_up=caught_up)
            if plan.rows:
                (row,) = plan.rows
                own = drafts.get(row, ())
                passes.all.append(_pass(row, own, caught_up, engine.drafting, speculation))
            return decoded

        return run

    def pushed(original: Callable[..., Any]) -> Callable[..., Any]:
        def push(reply: Reply, *given: Any) -> list[Delta]:
            deltas: list[Delta] = original(reply, *given)
            read = len(passes.all) - (not apart)  # the last one may run still
            if any(delta.tool_calls for delta in deltas):
                passes.begun = passes.begun or read
            passes.read = read
            return deltas

        return push

    with Replaced() as patch:
        wrap(patch, Decode, "_catch_up", caught_up)
        wrap(patch, Decode, "run", ran)
        wrap(patch, Reply, "push", pushed)
        yield passes


def _pass(
    row: Row,
    drafts: Sequence[int],
    caught_up: bool,
    drafting: DraftStep,
    speculation: Speculation | None,
) -> Pass:
    origin = drafting._origins[row] if drafts else Origin()
    if origin.source is None or speculation is None:
        return Pass(1 + len(drafts), caught_up)
    source = speculation.sources[origin.source]
    kind = "MTP" if source.shows else "lookup"
    if isinstance(source.drafting, ScoresPrompts):
        kind = "draft model"
    return Pass(1 + len(drafts), caught_up, len(drafts) - origin.known, kind)
