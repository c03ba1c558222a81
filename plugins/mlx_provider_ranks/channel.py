"""The control channel of a rank group, for decisions of the leader and heartbeats.

TCP, one connection for each follower. It does not send tensors.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from mlx_provider.errors import ProcessLost

from .address import Meeting, bind_host, leader_hosts, new_key, spread
from .door import Door, Guest
from .follower_link import FollowerLink
from .framing import BadFrame, frame, receive
from .leader_link import LeaderLink
from .messages import Hello, ProcessStatus, RankFault, RanksDiffer, differences, rank_name
from .watch import BEAT_EVERY, FOUND_LIMIT, LONGEST_REASON, Watch

START_PATIENCE = 120.0
"""Seconds until every rank has come: Python and MLX are loaded before, models are not."""
LEADER_PATIENCE = 3.5
"""Seconds without a beat of the leader, whose clients wait."""
LOOK_EVERY = 0.05
"""Seconds after which a rank looks whether its leader is gone: a launcher ends it right after."""
CONNECT_LIMIT = 3.0
CONNECT_PAUSE = 0.2
WAIT_TICK = 0.05

CLOSED = "the connection was closed"

Lost = Callable[[RankFault], None]


class LeaderChannel:
    """Rank 0's side. One thread calls `tell`; all other methods are thread-safe."""

    def __init__(self, guests: list[Guest], hello: Hello, lost: Lost, patience: float) -> None:
        """`guests`: every follower, by rank."""
        self._hello = hello
        self._since = time.time()
        self._links = [FollowerLink(guest) for guest in guests]
        self._kept = Kept()
        self._watch = Watch(self._links, lost, patience)
        self._watch.start()

    @classmethod
    def open(
        cls,
        group: Any,
        hello: Hello,
        lost: Lost,
        *,
        patience: float = 5.0,
        start_patience: float = START_PATIENCE,
    ) -> LeaderChannel:
        """Wait for every follower of an `mx.distributed.Group`, of which this is rank 0.

        `lost` is called once, from the channel's thread, for the first rank that is lost.
        `patience`: seconds that a rank can be behind. Raises `ProcessLost` if a rank does not come,
        `RanksDiffer` if one must not compute with this one.
        """
        hosts = leader_hosts()
        listener = socket.create_server((bind_host(hosts), 0), backlog=128)
        meeting = Meeting(hosts, listener.getsockname()[1], new_key())
        with ExitStack() as undo:
            undo.callback(listener.close)
            spread(group, meeting)
            undo.pop_all()
        return cls.meet(listener, meeting.key, group.size(), hello, lost, patience, start_patience)

    @classmethod
    def meet(
        cls,
        listener: socket.socket,
        key: str,
        size: int,
        hello: Hello,
        lost: Lost,
        patience: float = 5.0,
        start_patience: float = START_PATIENCE,
    ) -> LeaderChannel:
        """Like `open`, for followers that already have the address and the key."""
        guests = Door(listener, key, size, time.monotonic).wait(start_patience)
        _welcome(guests, hello)
        return cls(guests, hello, lost, patience)

    def tell(self, message: Mapping[str, Any], *, more: bool = False) -> None:
        """Send one message to every follower. `more`: together with the next one.

        Raises `ProcessLost` after a rank is lost.
        """
        self._raise_lost()
        self._kept.add(message)
        if not more:
            self.send()

    def send(self) -> None:
        """Send the messages of `tell` with `more`. Raises `ProcessLost`."""
        kinds, data = self._kept.taken()
        self._watch.sending(kinds)
        for link in self._links:
            if data and not link.send(data):
                self._watch.closed(link)
        self._raise_lost()

    @property
    def fault(self) -> RankFault | None:
        """The fault of the first rank that was lost."""
        return self._watch.fault

    def statuses(self) -> list[ProcessStatus]:
        """The status of every rank, this one first."""
        mine = _status(self._hello, self._since, None)
        return [mine, *(_status(each.hello, self._since, each.fault) for each in self._links)]

    @property
    def hellos(self) -> list[Hello]:
        """The `Hello` of every rank, this one first."""
        return [self._hello, *(each.hello for each in self._links)]

    def wait_heard(self) -> None:
        """Wait until every follower has received all messages. Raises `ProcessLost`."""
        while not self._watch.heard_all():
            self._raise_lost()
            time.sleep(WAIT_TICK)

    def leader_failed(self, reason: str) -> None:
        """This rank has failed, so that the group ends."""
        self._watch.lead_lost(
            RankFault(rank=0, host=self._hello.host, reason=reason, since=time.time())
        )

    def close(self) -> None:
        """Leave the group in order. Idempotent."""
        self._watch.stop()
        for link in self._links:
            link.close()

    def _raise_lost(self) -> None:
        if self._watch.fault is not None:
            raise self._watch.fault.error()


class Kept:
    """Messages that are sent together, so that a receiver wakes up only once."""

    def __init__(self) -> None:
        self._kinds: list[str] = []
        self._frames: list[bytes] = []

    def add(self, message: Mapping[str, Any]) -> None:
        """Raises `BodyTooLarge`."""
        self._frames.append(frame(message))
        self._kinds.append(str(message.get("kind", "")))

    def taken(self) -> tuple[list[str], bytes]:
        """Take the messages: their kinds and their bytes."""
        kinds, frames = self._kinds, self._frames
        self._kinds, self._frames = [], []
        return kinds, b"".join(frames)


class FollowerChannel:
    """The side of another rank. One thread calls `hear`."""

    def __init__(
        self, sock: socket.socket, hello: Hello, leader: Hello, lost: Lost | None = None
    ) -> None:
        self.hello = hello
        self.leader = leader
        self._link = LeaderLink(sock)
        self._lost = lost
        self._fault: RankFault | None = None
        self._heard = 0
        self._since: float | None = None
        """When it began what it last heard of; `None`: it waits for more."""
        self._ending = threading.Lock()
        self._left = threading.Event()
        threading.Thread(target=self._beat, name="rank-beat", daemon=True).start()

    @classmethod
    def join(
        cls,
        group: Any,
        hello: Hello,
        lost: Lost | None = None,
        *,
        start_patience: float = START_PATIENCE,
    ) -> FollowerChannel:
        """Connect to the leader. Raises `ProcessLost` if that fails, and `RanksDiffer`.

        `lost` is called once, from the channel's thread, when the leader is lost, because the
        thread of `hear` can hang in a collective.
        """
        return cls.meet(spread(group, None), hello, lost, start_patience)

    @classmethod
    def meet(
        cls,
        meeting: Meeting,
        hello: Hello,
        lost: Lost | None = None,
        start_patience: float = START_PATIENCE,
    ) -> FollowerChannel:
        """Like `join`, with the leader's address."""
        sock = _connect(meeting, start_patience)
        with ExitStack() as undo:
            undo.callback(sock.close)
            try:
                sock.sendall(frame({"key": meeting.key, "hello": hello.model_dump()}))
                sock.settimeout(start_patience)
                leader = _welcomed(sock)
            except (OSError, BadFrame) as error:
                raise ProcessLost(
                    f"the leader (rank 0) did not let this rank in: {error}"
                ) from None
            undo.pop_all()
        return cls(sock, hello, leader, lost)

    def hear(self) -> dict[str, Any]:
        """The next message, in order. Raises `ProcessLost` when the leader is lost."""
        self._since = None
        try:
            message = self._link.next()
        except (OSError, BadFrame) as error:
            self._end(_reason(error))
            raise self._gone().error() from None
        self._heard += 1
        self._since = time.monotonic()
        return message

    def failed(self, reason: str) -> None:
        """Send the leader the reason for a failure of this rank, and wait until it closes.

        If the leader is lost, which can be the cause of the failure, `lost` is called.
        """
        self._send({"heard": self._heard, "failed": reason[:LONGEST_REASON]})
        self._left.wait(FOUND_LIMIT)

    def close(self) -> None:
        """Leave. The leader treats this rank as lost, unless it has left before. Idempotent."""
        self._left.set()
        self._end("this rank has left the group")
        self._link.close()

    def _beat(self) -> None:
        """Send heartbeats with this rank's progress, and detect the loss of the leader."""
        next_beat = 0.0
        while not self._left.wait(LOOK_EVERY):
            now, since = time.monotonic(), self._since
            if now >= next_beat:
                next_beat = now + BEAT_EVERY
                works = 0.0 if since is None else now - since
                self._send({"heard": self._heard, "works": works})
            try:
                silence = self._link.look()
            except (OSError, BadFrame) as error:
                self._end(_reason(error))
                return
            if silence > LEADER_PATIENCE:
                self._end(f"no beat for {LEADER_PATIENCE:g} s")

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._link.send(frame(message))
        except OSError as error:
            self._end(_reason(error))

    def _end(self, reason: str) -> None:
        """End with a reason. Only the first one counts."""
        with self._ending:
            if self._fault is not None:
                return
            self._fault = RankFault(rank=0, host=self.leader.host, reason=reason, since=time.time())
        self._link.shut()
        if self._lost is not None and not self._left.is_set():
            self._lost(self._fault)  # before `failed` returns, because the process ends then
        self._left.set()

    def _gone(self) -> RankFault:
        assert self._fault is not None, "set by whoever ends it"  # noqa: S101
        return self._fault


def _welcome(guests: list[Guest], hello: Hello) -> None:
    """Send every follower the leader's `Hello`, or the differences."""
    odd = [line for guest in guests for line in differences(hello, guest.hello)]
    answer = {"differ": odd} if odd else {"hello": hello.model_dump()}
    data = frame(answer)
    for guest in guests:
        try:
            guest.sock.settimeout(CONNECT_LIMIT)
            guest.sock.sendall(data)
        except OSError as error:
            if not odd:
                _close_all(guests)
                where = f"rank {guest.hello.rank} on {guest.hello.host}"
                raise ProcessLost(f"{where} left at start: {error}") from None
    if odd:
        _close_all(guests)
        raise _differ(odd)


def _welcomed(sock: socket.socket) -> Hello:
    answer = receive(sock)
    if "differ" in answer:
        raise _differ(answer["differ"])
    return Hello.model_validate(answer["hello"])


def _differ(lines: list[str]) -> RanksDiffer:
    return RanksDiffer("ranks differ: " + "; ".join(lines))


def _connect(meeting: Meeting, limit: float) -> socket.socket:
    deadline = time.monotonic() + limit
    while True:
        for host in meeting.hosts:
            try:
                sock = socket.create_connection((host, meeting.port), timeout=CONNECT_LIMIT)
            except OSError as error:
                failure = f"{host}:{meeting.port}: {error}"
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        if time.monotonic() > deadline:
            raise ProcessLost(f"the leader (rank 0) cannot be reached on {failure}")
        time.sleep(CONNECT_PAUSE)


def _reason(error: OSError | BadFrame) -> str:
    """The reason for a lost connection."""
    return CLOSED if isinstance(error, ConnectionError) else str(error)


def _status(hello: Hello, since: float, fault: RankFault | None) -> ProcessStatus:
    return ProcessStatus(
        name=rank_name(hello.rank),
        host=hello.host,
        pid=hello.pid,
        device=hello.device,
        state="serving" if fault is None else "lost",
        since=since if fault is None else fault.since,
        detail="" if fault is None else fault.reason,
    )


def _close_all(guests: list[Guest]) -> None:
    for guest in guests:
        guest.sock.close()
