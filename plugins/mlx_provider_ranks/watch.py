"""Detects lost and slow followers, in one thread of the leader."""

from __future__ import annotations

import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .follower_link import FollowerLink
from .framing import BadFrame
from .messages import RankFault

BEAT_EVERY = 0.5
"""Seconds between two beats of a rank."""
TICK = 0.1
LOADING = (
    "feature budget",
    "layouts",
    "limits",
    "known",
    "judgement",
    "timed enough",
    "measured",
    "made",
    "compared",
)
"""Kinds of messages while a model is loaded and tried."""
LONG_WORK = frozenset({"load", "start", "unload", *LOADING})
"""Kinds of messages after which a follower may be behind for as long as it beats."""
WORK_LIMIT = 120.0
"""Seconds that a piece of a step may take, one chunk of a prompt at most: more, and it hangs."""
ENDED = "its process ended, or closed the connection"
FOUND_LIMIT = 1.0
"""Seconds for the reason of a failed send to arrive from the other side."""
LONGEST_REASON = 1000


class SentMessages:
    """Numbers, times and kinds of messages that a follower has not received. For two threads: one
    adds, one reads and prunes."""

    def __init__(self) -> None:
        self.count = 0
        self._first = 1
        self._kept: deque[tuple[float, str]] = deque()

    def add(self, kind: str, now: float) -> None:
        self._kept.append((now, kind))
        self.count += 1

    def prune(self, heard: int) -> None:
        """Forget the messages before number `heard`."""
        while self._first < heard and self._kept:
            self._kept.popleft()
            self._first += 1

    def time(self, number: int) -> float:
        return self._kept[number - self._first][0]

    def kind(self, number: int) -> str:
        """The kind of a message; empty before the first one."""
        return self._kept[number - self._first][1] if number >= self._first else ""


class Progress:
    """The progress of a follower, from its heartbeats."""

    def __init__(self, now: float) -> None:
        self.beat = now
        self.heard = 0
        self.works = 0.0
        """Seconds for which it has been at what it last heard of; 0: it waits for more."""
        self.moved = now

    def take(self, heard: int, now: float, works: float = 0.0) -> None:
        self.beat, self.works = now, works
        if heard != self.heard:
            self.heard, self.moved = heard, now

    def behind(self, sent: SentMessages, now: float) -> float:
        """Seconds without progress while a message waits for it. 0 during long work."""
        if self.heard >= sent.count or sent.kind(self.heard) in LONG_WORK:
            return 0.0
        return now - max(self.moved, sent.time(self.heard + 1))

    def hangs(self, sent: SentMessages) -> bool:
        """Whether it works on one message for too long. Rank 0 can be waiting for it, too."""
        return self.works > WORK_LIMIT and sent.kind(self.heard) not in LONG_WORK


class Watch:
    """Sends heartbeats to every follower, reads theirs, and finds the first lost one."""

    def __init__(
        self, links: Sequence[FollowerLink], lost: Callable[[RankFault], None], patience: float
    ) -> None:
        self._lost = lost
        self._patience = patience
        self._silence = max(patience - 1, patience / 2)
        now = time.monotonic()
        self._progress = {link: Progress(now) for link in links}
        self._sent = SentMessages()
        self._losing = threading.Lock()
        self._found = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self.fault: RankFault | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Report no lost rank from now on. Idempotent."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def sending(self, kinds: Sequence[str]) -> None:
        """Call it before messages are sent. A follower that leaves after an `end` is not lost."""
        now = time.monotonic()
        for kind in kinds:
            self._sent.add(kind, now)
        if "end" in kinds:
            self._stopped.set()

    def closed(self, link: FollowerLink) -> None:
        """A message could not be sent."""
        self._found.wait(FOUND_LIMIT)
        self._lose(link, ENDED)

    def heard_all(self) -> bool:
        """Whether all followers have received all messages, by their last heartbeats."""
        return all(each.heard >= self._sent.count for each in self._progress.values())

    def lead_lost(self, fault: RankFault) -> None:
        """The leader has failed, usually because of another rank, which the fault names."""
        self._found.wait(FOUND_LIMIT)
        with self._losing:
            if self.fault is not None or self._stopped.is_set():
                return
            self.fault = fault
        self._lost(fault)

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        for link in self._progress:
            selector.register(link.sock, selectors.EVENT_READ, link)
        next_beat = 0.0
        while not self._stopped.is_set():
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_EVERY
                self._beat()
            self._turn(selector)
        selector.close()

    def _beat(self) -> None:
        for link in self._progress:
            if link.fault is None:
                link.beat()

    def _turn(self, selector: selectors.BaseSelector) -> None:
        if not selector.get_map():
            self._stopped.wait(TICK)
        for key, _ in selector.select(TICK):
            self._read(key.data)
        self._judge()
        for key in list(selector.get_map().values()):
            if key.data.fault is not None:
                selector.unregister(key.fileobj)

    def _read(self, link: FollowerLink) -> None:
        try:
            for message in link.received():
                self._take(link, message)
        except BadFrame as error:
            self._lose(link, f"it sent what is no message: {error}")
        except OSError:
            self._lose(link, ENDED)

    def _take(self, link: FollowerLink, message: dict[str, Any]) -> None:
        heard, reason = message.get("heard"), message.get("failed")
        if type(heard) is not int or not 0 <= heard <= self._sent.count:
            raise BadFrame(f"heard: {heard!r:.100}")
        works = message.get("works", 0.0)
        if type(works) is not float:
            raise BadFrame(f"works: {works!r:.100}")
        self._progress[link].take(heard, time.monotonic(), works)
        if reason is not None:
            self._lose(link, str(reason)[:LONGEST_REASON])

    def _judge(self) -> None:
        now = time.monotonic()
        for link, progress in self._progress.items():
            if link.fault is not None:
                continue
            if now - progress.beat > self._silence:
                self._lose(link, f"no beat for {self._silence:g} s")
            elif progress.behind(self._sent, now) > self._patience:
                self._lose(link, f"it lives, but has heard nothing for {self._patience:g} s")
            elif progress.hangs(self._sent):
                self._lose(link, f"it lives, but a pass has not ended for {WORK_LIMIT:g} s")
        serving = [each.heard for link, each in self._progress.items() if link.fault is None]
        if serving:
            self._sent.prune(min(serving))

    def _lose(self, link: FollowerLink, reason: str) -> None:
        """Record a lost rank. Only the first reason counts, and only the first rank is reported."""
        with self._losing:
            if link.fault is not None or self._stopped.is_set():
                return
            hello = link.hello
            link.fault = RankFault(
                rank=hello.rank, host=hello.host, reason=reason, since=time.time()
            )
            first = self.fault is None
            if first:
                self.fault = link.fault
        self._found.set()
        link.shut()
        if first:
            self._lost(link.fault)
