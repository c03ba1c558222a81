"""A workload on a fleet, event by event."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from .account import Account
from .engines import Engines
from .faults import Fault
from .policies import Policy
from .workload import Workload

ASKS, STARTS, FAULT = -1, -2, -3
"""What an event is; from 0 on: an answer of that engine's ends."""
Event = tuple[float, int, int]
"""(when, conversation or fault, what); a conversation has one at a time."""


class Run:
    """One policy's run; `done` when it is over."""

    def __init__(
        self,
        workload: Workload,
        engines: Engines,
        policy: Policy,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.workload, self.engines, self.policy = workload, engines, policy
        self.faults = faults
        self.account = Account()
        self.alive = (1 << engines.count) - 1
        self.events: list[Event] = []
        self.waiting: deque[int] = deque()
        """Conversations that no engine could take, until one can."""
        count = workload.sessions
        self.at = list(workload.first[:count])
        """Each conversation's next request."""
        self.place = [-1] * count
        """The engine of the last one."""
        self.held = [0] * count
        """Tokens of the last prompt and its answer, where the next one may repeat them."""
        self.name = list(range(count))
        """What caches know it by: it gets another with every summary."""
        self.names = count

    def done(self) -> Account:
        """Run all of it."""
        self._push_start(0)
        self._push_fault(0)
        events, talking = self.events, self.workload.sessions
        while talking:
            now, number, what = heappop(events)
            if what >= 0:
                talking -= self._answered(now, number, what)
            elif what == FAULT:
                self._fault(now, number)
            else:
                if what == STARTS:
                    self._push_start(number + 1)
                self._ask(now, number)
        return self.account

    def _push_start(self, talk: int) -> None:
        if talk < self.workload.sessions:
            heappush(self.events, (self.workload.start[talk], talk, STARTS))

    def _push_fault(self, number: int) -> None:
        if number < len(self.faults):
            heappush(self.events, (self.faults[number].at, number, FAULT))

    def _ask(self, now: float, talk: int) -> None:
        work = self.workload
        at, prefix = self.at[talk], work.prefix[talk]
        prompt, answer = work.prompt[at], work.answer[at]
        engine = self._chosen(talk, prefix, now)
        if engine is None:
            self.waiting.append(talk)
            return
        common, shared = self._common(talk, at, prompt), min(work.shared[prefix], prompt)
        served = self.engines.serve(
            engine, now, self.name[talk], prefix, shared, common, prompt, answer
        )
        self.policy.begun(engine, now)
        self.account.add(prompt, now, served, moved=self.place[talk] not in (engine, -1))
        self.place[talk], self.held[talk] = engine, prompt + answer
        heappush(self.events, (served.ended, talk, engine))

    def _chosen(self, talk: int, prefix: int, now: float) -> int | None:
        """An engine that has room, in the place of one that refuses; `None`: there is none."""
        among, full = self.alive, self.engines.full
        if not among:
            return None
        engine = self.policy.choose(talk, prefix, among, now)
        if not full >> engine & 1:
            return engine
        self.account.refused += 1
        among &= ~full
        return self.policy.choose(talk, prefix, among, now) if among else None

    def _common(self, talk: int, at: int, prompt: int) -> int:
        """Tokens that a prompt has in common with the conversation's last. A summary is of another
        conversation, of which no cache has any."""
        held = self.held[talk]
        if held and prompt < self.workload.prompt[max(at - 1, self.workload.first[talk])]:
            self.name[talk], self.names = self.names, self.names + 1
        return min(held, prompt)

    def _answered(self, now: float, talk: int, engine: int) -> bool:
        """Whether that was the conversation's last."""
        work, at = self.workload, self.at[talk]
        self.engines.ended(engine, work.prompt[at])
        self.policy.ended(engine, now)
        self._let_in(1, now)
        self.at[talk] = at = at + 1
        self.account.span = now
        if at == work.first[talk + 1]:
            return True
        gap = work.gap[at]
        heappush(self.events, (max(now, gap) if work.timed else now + gap, talk, ASKS))
        return False

    def _let_in(self, most: int, now: float) -> None:
        for _ in range(min(most, len(self.waiting))):
            heappush(self.events, (now, self.waiting.popleft(), ASKS))

    def _fault(self, now: float, number: int) -> None:
        fault = self.faults[number]
        bit = 1 << fault.engine
        if fault.back:
            self.alive |= bit
            self.engines.restarted(fault.engine, now)
            self._let_in(self.engines.machine.most, now)
        elif self.alive & bit:
            self.alive &= ~bit
            if not fault.drained:
                self._died(fault.engine, now)
        self._push_fault(number + 1)

    def _died(self, engine: int, now: float) -> None:
        """What ran there is asked of another engine at once."""
        lost = {event for event in self.events if event[2] == engine}
        kept = [event for event in self.events if event not in lost]
        self.events[:] = kept + sorted((now, talk, ASKS) for _, talk, _ in lost)
        heapify(self.events)
        self.account.lost += len(lost)
        for _ in lost:
            self.policy.ended(engine, now)
        self.engines.died(engine, now)
