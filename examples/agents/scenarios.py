"""What every coding agent is put through."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from clients import Agent
from gateway import CONTEXTS, WIDE, Gateway, Seen
from installed import Installed
from running import Running, start

from mlx_provider.testing.scripted import Call, Step, script

LIMIT = 120.0
"""Seconds for a client to come to an end."""
ROW_LIMIT = 20.0
FULL_STEPS = 12
ROOM = 20_000
"""Tokens that a context has more than the client's first prompt."""
SHARE = 0.95
SORRY = ("context", "too long", "too large", "exceed", "room")


@dataclass(frozen=True)
class Outcome:
    """A cell of the table."""

    good: bool
    told: str


@dataclass(frozen=True)
class Setting:
    """One client, and where it runs."""

    agent: Agent
    gateway: Gateway
    installed: Installed

    def start(self, *steps: Step, context: int = WIDE, told: int | None = None) -> Running:
        prompt = script(*steps)
        return start(self.agent, self.gateway, self.installed, prompt, context=context, told=told)

    def shell(self, line: str) -> Call:
        assert self.agent.shell is not None
        return self.agent.shell(line)


def faults(seen: Seen) -> str:
    """What went wrong on the way, for a cell."""
    bad = [ended.reason for ended in seen.requests if ended.reason not in GOOD]
    told = [*(f"HTTP {status}" for status in sorted(set(seen.errors))), *sorted(set(bad))]
    return ", ".join(told)


GOOD = ("stop", "tool_calls", "length")


def judged(good: bool, told: str, running: Running, seen: Seen) -> Outcome:
    """A cell with what went wrong; the last words of a client that failed."""
    wrong = faults(seen)
    if not good:
        told = " ".join(running.said.split())[-160:] or f"exit code {running.process.returncode}"
    return Outcome(good and not wrong, f"{told} ({wrong})" if wrong else told)


def plain(setting: Setting) -> Outcome:
    """An answer in words."""
    moment = setting.gateway.now()
    running = setting.start(Step("The answer is violet-17."))
    said = running.wait(LIMIT)
    seen = setting.gateway.since(moment)
    return judged("violet-17" in said, "yes", running, seen)


def tools(setting: Setting) -> tuple[Outcome, Outcome]:
    """Three calls, two of them at once; and how much of the last prompt was cached."""
    moment = setting.gateway.now()
    writes = [setting.shell(f"echo {name} > {name}.txt") for name in ("one", "two", "three")]
    running = setting.start(Step("First.", (writes[0],)), Step("Both.", tuple(writes[1:])))
    said = running.wait(LIMIT)
    seen = setting.gateway.since(moment)
    files = {path.stem: path.read_text().strip() for path in running.work.glob("*.txt")}
    good = files == {name: name for name in ("one", "two", "three")} and "All 2 steps" in said
    return judged(good, "3 calls", running, seen), _cached(seen)


def _cached(seen: Seen) -> Outcome:
    """The least share of a prompt that was cached, of all but the first of the conversation."""
    turns = _conversation(seen)
    shares = [ended.cached / ended.length for ended in turns[1:]]
    if not shares:
        return Outcome(False, "no second turn")
    return Outcome(min(shares) >= SHARE, f"{min(shares):.3f}")


def _conversation(seen: Seen) -> list:
    """Requests without side ones, which are short."""
    longest = max((ended.length for ended in seen.requests), default=0)
    return [ended for ended in seen.requests if ended.length > longest / 2]


def cancel(setting: Setting) -> Outcome:
    """Ctrl-C in the middle of a reply."""
    gateway = setting.gateway
    moment = gateway.now()
    with setting.start(Step("Counting: ", count=20_000, slow=0.05)) as running:
        if not gateway.wait(running.replies, LIMIT):
            running.kill()
            return judged(False, "", running, gateway.since(moment))
        running.interrupt()
        ended = gateway.wait(running.ended, ROW_LIMIT)
    if not gateway.wait(gateway.free, ROW_LIMIT):
        return Outcome(False, f"its row runs on after {ROW_LIMIT:.0f} s")
    how = "ends" if ended else f"does not end within {ROW_LIMIT:.0f} s: killed"
    return Outcome(ended, f"{how}; row free")


def full(setting: Setting, *, told: bool) -> Outcome:
    """More tool results than the context holds; the client was told how much that is, or not."""
    gateway = setting.gateway
    first = _first_prompt(setting)
    context = min((c for c in CONTEXTS if c >= first + ROOM), default=WIDE)
    moment = gateway.now()
    steps = _filling(setting.shell)
    running = setting.start(*steps, context=context, told=context if told else WIDE)
    said = running.wait(2 * LIMIT)
    seen = gateway.since(moment)
    codes = "".join(f", HTTP {status}" for status in sorted(set(seen.errors)))
    done = len(list(running.work.glob("full-*.txt")))
    if done == FULL_STEPS and "steps are done" in said:
        return Outcome(True, f"compacts and goes on{codes}")
    last = " ".join(said.split())[-300:]
    counted = f"{done} of {FULL_STEPS} calls{codes}"
    if any(word in last.lower() for word in SORRY):
        return Outcome(True, f"says so after {counted}")
    told = f"…{last[-70:]}" if last else "ends without a word"
    return Outcome(False, f"{counted}: {told}")


def _first_prompt(setting: Setting) -> int:
    """Tokens of a conversation's first prompt."""
    moment = setting.gateway.now()
    setting.start(Step("Hello.")).wait(LIMIT)
    return max((each.length for each in setting.gateway.since(moment).requests), default=0)


def _filling(shell) -> Sequence[Step]:
    lines = (f"seq {k}1000 {k}2200; echo {k} > full-{k}.txt" for k in range(1, FULL_STEPS + 1))
    return [Step(f"Step {k}.", (shell(line),)) for k, line in enumerate(lines, 1)]


def prefills(settings: Sequence[Setting], seconds: float) -> dict[str, Outcome]:
    """Prompts that take so long to compute, of all clients side by side."""
    since = time.time()
    step = Step("Computed violet-18.", prefill=seconds, since=since)
    running = {each.agent.name: each.start(step) for each in settings}
    waiting, lasted = dict(running), {}
    try:
        while waiting and time.time() < since + 1.5 * seconds + LIMIT:
            time.sleep(0.5)
            settings[0].gateway.check()
            for name in [name for name, each in waiting.items() if each.ended()]:
                lasted[name] = running[name].seconds
                waiting.pop(name).kill()
    finally:
        for each in waiting.values():
            each.kill()
    return {name: _waited(each, lasted.get(name)) for name, each in running.items()}


def _waited(running: Running, lasted: float | None) -> Outcome:
    if "Computed violet-18." in running.said:
        return Outcome(True, f"answer after {lasted:.0f} s" if lasted else "answer, but no end")
    last = " ".join(running.said.split())[-160:]
    when = f"gives up after {lasted:.0f} s" if lasted else "no end"
    return Outcome(False, f"{when}: …{last}")
