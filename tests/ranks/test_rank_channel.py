"""The control channel: messages, faults and strangers, over real sockets."""

from __future__ import annotations

import queue
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from mlx_provider.errors import ProcessLost
from mlx_provider_ranks.address import Meeting, new_key
from mlx_provider_ranks.channel import FollowerChannel, LeaderChannel
from mlx_provider_ranks.messages import Hello, RankFault, RanksDiffer

LIMIT = 20.0


def hello(rank: int, **changes: object) -> Hello:
    base = Hello(
        rank=rank,
        host=f"mac-{rank}",
        pid=100 + rank,
        python="3.11.9",
        versions={"mlx": "0.32.4"},
        plugins={"x:y": "1"},
        device="M4",
        memory_limit=2**34,
    )
    return base.model_copy(update=changes)


@dataclass
class Group:
    """A leader that waits, for followers of this process or of others."""

    meeting: Meeting
    faults: queue.Queue[RankFault] = field(default_factory=queue.Queue)
    answers: queue.Queue[LeaderChannel | Exception] = field(default_factory=queue.Queue)

    def leader(self) -> LeaderChannel:
        answer = self.answers.get(timeout=LIMIT)
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def group(size: int = 2, patience: float = 5.0, start: float = LIMIT) -> Iterator[Group]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    key = new_key()
    made = Group(Meeting(("127.0.0.1",), listener.getsockname()[1], key))
    opened: list[LeaderChannel] = []

    def lead() -> None:
        try:
            opened.append(
                LeaderChannel.meet(listener, key, size, hello(0), made.faults.put, patience, start)
            )
            made.answers.put(opened[0])
        except (ProcessLost, RanksDiffer) as error:
            made.answers.put(error)

    thread = threading.Thread(target=lead)
    thread.start()
    yield made
    thread.join(LIMIT)
    for each in opened:
        each.close()


def in_threads(calls: list[Callable[[], object]]) -> list[object]:
    found: dict[int, object] = {}

    def run(index: int) -> None:
        try:
            found[index] = calls[index]()
        except (ProcessLost, RanksDiffer) as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    return [found[index] for index in range(len(calls))]


def followers(made: Group, size: int) -> list[FollowerChannel]:
    joined = in_threads(
        [lambda r=rank: FollowerChannel.meet(made.meeting, hello(r)) for rank in range(1, size)]
    )
    return [each for each in joined if isinstance(each, FollowerChannel)]


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_every_follower_hears_every_message_in_order() -> None:
    with group(3) as made:
        one, two = followers(made, 3)
        leader = made.leader()
        sent = [{"kind": "step", "tokens": list(range(n))} for n in range(50)]
        for message in sent:
            leader.tell(message)
        assert [one.hear() for _ in sent] == sent == [two.hear() for _ in sent]
        assert one.leader.host == "mac-0"
        assert [each.state for each in leader.statuses()] == ["serving"] * 3
        assert [each.name for each in leader.statuses()] == ["rank 0", "rank 1", "rank 2"]
        leader.close()
        for each in (one, two):
            with pytest.raises(ProcessLost, match="rank 0 on mac-0 is lost"):
                each.hear()
            each.close()
    assert made.faults.empty()


def test_what_opens_a_step_goes_out_with_what_follows() -> None:
    from mlx_provider_ranks.framing import BEAT, frame, receive

    one, two = {"kind": "step"}, {"kind": "plan"}
    with group() as made:
        sock = _greet(made.meeting, 1)
        leader = made.leader()
        receive(sock)  # the leader's hello
        leader.tell(one, more=True)
        assert sock.recv(4) == BEAT  # nothing came before it
        leader.tell(two)
        assert receive(sock) == one
        assert sock.recv(1024).startswith(frame(two))
        leader.tell(two, more=True)
        leader.send()
        assert receive(sock) == two
        sock.close()


def test_one_that_is_busy_notices_that_the_leader_is_gone() -> None:
    """It may wait in a collective, for ever."""
    ours, theirs = socket.socketpair()
    faults: queue.Queue[RankFault] = queue.Queue()
    follower = FollowerChannel(ours, hello(1), hello(0), faults.put)
    theirs.close()
    assert faults.get(timeout=LIMIT).rank == 0
    follower.close()


def test_one_that_fails_leaves_after_its_loss_is_reported() -> None:
    """Its process ends when `failed` returns, so that a later report would be lost."""
    ours, theirs = socket.socketpair()
    begun, may_end, ended = (threading.Event() for _ in range(3))

    def lost(fault: RankFault) -> None:
        begun.set()
        assert may_end.wait(LIMIT)

    follower = FollowerChannel(ours, hello(1), hello(0), lost)
    theirs.close()
    assert begun.wait(LIMIT)
    leaving = threading.Thread(target=lambda: (follower.failed("it hears nothing"), ended.set()))
    leaving.start()
    assert not ended.wait(0.2)
    may_end.set()
    assert ended.wait(LIMIT)
    leaving.join()
    follower.close()


def test_a_message_of_megabytes_passes() -> None:
    with group() as made:
        (one,) = followers(made, 2)
        message = {"kind": "join", "tokens": list(range(400_000))}
        teller = threading.Thread(target=made.leader().tell, args=(message,))
        teller.start()
        assert one.hear() == message
        teller.join(LIMIT)
        one.close()


def test_a_told_failure_is_the_reason_and_is_told_once() -> None:
    with group(3) as made:
        one, two = followers(made, 3)
        leader = made.leader()
        one.failed("out of memory at layer 3")
        one.close()
        fault = made.faults.get(timeout=LIMIT)
        assert (fault.rank, fault.host) == (1, "mac-1")
        assert fault.reason == "out of memory at layer 3"
        with pytest.raises(ProcessLost, match="rank 1 on mac-1 is lost: out of memory at layer 3"):
            leader.tell({"kind": "step"})
        two.close()
        assert soon(lambda: [s.state for s in leader.statuses()] == ["serving", "lost", "lost"])
        assert leader.statuses()[1].detail == "out of memory at layer 3"
    assert made.faults.empty()


def test_a_send_that_fails_waits_for_the_reason() -> None:
    with group() as made:
        (one,) = followers(made, 2)
        leader = made.leader()
        one.failed("no memory")
        one.close()

        def tell_on() -> None:
            deadline = time.monotonic() + LIMIT
            while time.monotonic() < deadline:
                leader.tell({"kind": "step"})

        with pytest.raises(ProcessLost, match="no memory"):
            tell_on()


def test_differences_are_named_on_both_sides() -> None:
    with group(3) as made:
        odd = hello(2, versions={"mlx": "0.33.0"}, plugins={})
        joined = in_threads(
            [
                lambda: FollowerChannel.meet(made.meeting, hello(1, device="M2", memory_limit=1)),
                lambda: FollowerChannel.meet(made.meeting, odd),
            ]
        )
        with pytest.raises(RanksDiffer) as sent:
            made.leader()
    line = (
        "ranks differ: mlx: 0.33.0 on rank 2 (mac-2), 0.32.4 on rank 0 (mac-0); "
        "plugin x:y: not installed on rank 2 (mac-2), 1 on rank 0 (mac-0)"
    )
    assert str(sent.value) == line
    assert [str(each) for each in joined] == [line, line]
    assert all(isinstance(each, RanksDiffer) for each in joined)


def test_who_does_not_come_is_named() -> None:
    named = pytest.raises(ProcessLost, match=r"ranks 1, 2 did not come within 0.1 s")
    with group(3, start=0.1) as made, named:
        made.leader()


def test_strangers_cannot_keep_a_rank_out() -> None:
    """Hundreds that say nothing, one that is slow, and some that send garbage."""
    with group() as made:
        where = ("127.0.0.1", made.meeting.port)
        strangers = [socket.create_connection(where) for _ in range(200)]
        bombs = [
            struct.pack(">I", 2**32 - 1),
            struct.pack(">I", 5) + b"\xff\xfe{[}",
            struct.pack(">I", 2) + b"[]",
            struct.pack(">I", 0),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            struct.pack(">I", 13) + b'{"key":"\xc3\xa9"}'.ljust(13),
            struct.pack(">I", 60_000) + b"[" * 60_000,
        ]
        for stranger, data in zip(strangers[-20:], bombs * 2, strict=False):
            stranger.sendall(data)
        wrong = Meeting(("127.0.0.1",), made.meeting.port, "0" * 64)
        with pytest.raises(ProcessLost, match="did not let this rank in"):
            FollowerChannel.meet(wrong, hello(1))
        (one,) = followers(made, 2)
        made.leader().tell({"kind": "step"})
        assert one.hear() == {"kind": "step"}
        one.close()
        for each in strangers:
            each.close()


def test_a_second_connection_of_a_rank_is_a_strangers() -> None:
    with group(3) as made:
        first = in_threads([lambda: _greet(made.meeting, 1)])[0]
        with pytest.raises(ProcessLost, match="did not let this rank in"):
            FollowerChannel.meet(made.meeting, hello(1))
        assert isinstance(first, socket.socket)
        first.close()
        with pytest.raises(ProcessLost, match="rank 1 on mac-1 left at start"):
            made.leader()


def _greet(meeting: Meeting, rank: int) -> socket.socket:
    from mlx_provider_ranks.framing import frame

    sock = socket.create_connection((meeting.hosts[0], meeting.port))
    sock.sendall(frame({"key": meeting.key, "hello": hello(rank).model_dump()}))
    return sock


def test_one_that_never_beats_is_lost_though_its_connection_stands() -> None:
    with group(patience=0.4) as made:
        half_open = _greet(made.meeting, 1)
        leader = made.leader()
        fault = made.faults.get(timeout=LIMIT)
        assert fault.reason == "no beat for 0.2 s"
        with pytest.raises(ProcessLost, match="no beat"):
            leader.tell({"kind": "step"})
        half_open.close()


def test_a_tell_that_nobody_reads_ends_when_the_rank_is_lost() -> None:
    with group(patience=0.4) as made:
        half_open = _greet(made.meeting, 1)
        leader = made.leader()
        with pytest.raises(ProcessLost, match="no beat"):
            leader.tell({"kind": "join", "tokens": list(range(2_000_000))})
        half_open.close()


@pytest.mark.parametrize("garbage", [b"\xff" * 8, struct.pack(">I", 12) + b'{"heard": 9}'])
def test_a_follower_that_sends_garbage_is_lost(garbage: bytes) -> None:
    with group() as made:
        sock = _greet(made.meeting, 1)
        made.leader()
        sock.sendall(garbage)
        assert "it sent what is no message" in made.faults.get(timeout=LIMIT).reason
        sock.close()


def test_one_that_beats_and_hears_nothing_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_provider_ranks import channel

    monkeypatch.setattr(channel, "BEAT_EVERY", 0.05)  # no beat is late on a busy machine
    with group(patience=1.1) as made:
        (one,) = followers(made, 2)
        made.leader().tell({"kind": "step"})
        fault = made.faults.get(timeout=LIMIT)
        assert fault.reason == "it lives, but has heard nothing for 1.1 s"
        one.close()


def test_one_that_loads_may_be_behind() -> None:
    from mlx_provider_ranks.watch import Progress, SentMessages

    sent, progress = SentMessages(), Progress(0.0)
    assert progress.behind(sent, 100.0) == 0
    for kind, now in (("load", 1.0), ("step", 2.0), ("step", 3.0)):
        sent.add(kind, now)
    assert progress.behind(sent, 11.0) == 10
    progress.take(1, 12.0)
    sent.prune(1)
    assert progress.behind(sent, 500.0) == 0
    progress.take(2, 600.0)
    sent.prune(2)
    assert progress.behind(sent, 603.0) == 3
    progress.take(3, 604.0)
    assert progress.behind(sent, 900.0) == 0


def test_one_that_waits_or_loads_does_not_hang() -> None:
    from mlx_provider_ranks.watch import WORK_LIMIT, Progress, SentMessages

    sent, progress = SentMessages(), Progress(0.0)
    assert not progress.hangs(sent)
    for heard, kind in enumerate(("load", "step"), 1):
        sent.add(kind, 1.0)
        progress.take(heard, 2.0, works=0.0)
        assert not progress.hangs(sent), "it waits"
        progress.take(heard, 3.0, works=WORK_LIMIT + 1)
        assert progress.hangs(sent) == (kind == "step")


def test_one_that_does_not_come_back_from_a_pass_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 tells nothing meanwhile: it waits in the same pass."""
    from mlx_provider_ranks import watch

    monkeypatch.setattr(watch, "WORK_LIMIT", 0.2)
    with group() as made:
        (one,) = followers(made, 2)
        leader = made.leader()
        leader.tell({"kind": "plan"})
        one.hear()
        assert (
            made.faults.get(timeout=LIMIT).reason == "it lives, but a pass has not ended for 0.2 s"
        )
        one.close()


def test_a_leader_that_stands_still_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_provider_ranks import channel
    from mlx_provider_ranks.framing import frame

    monkeypatch.setattr(channel, "LEADER_PATIENCE", 0.2)
    ours, theirs = socket.socketpair()
    faults: queue.Queue[RankFault] = queue.Queue()
    follower = FollowerChannel(ours, hello(1), hello(0), faults.put)
    theirs.sendall(frame({"kind": "step"}))
    assert follower.hear() == {"kind": "step"}
    assert faults.get(timeout=LIMIT).reason == "no beat for 0.2 s"
    with pytest.raises(ProcessLost, match=r"rank 0 on mac-0 is lost: no beat for 0.2 s"):
        follower.hear()
    follower.close()
    theirs.close()
    assert faults.empty()


FOLLOWER = """
import sys
from mlx_provider_ranks.address import Meeting
from mlx_provider_ranks.channel import FollowerChannel
from mlx_provider_ranks.messages import Hello

meeting = Meeting(("127.0.0.1",), int(sys.argv[1]), sys.argv[2])
follower = FollowerChannel.meet(meeting, Hello.model_validate_json(sys.argv[3]))
while True:
    follower.hear()
"""


@pytest.mark.parametrize(
    ("number", "patience", "reason"),
    [
        (signal.SIGKILL, 30.0, "its process ended, or closed the connection"),
        (signal.SIGSTOP, 1.6, "no beat for 0.8 s"),
    ],
)
def test_a_process_that_is_killed_or_stopped_is_lost(
    number: signal.Signals, patience: float, reason: str
) -> None:
    with group(patience=patience) as made:
        arguments = [str(made.meeting.port), made.meeting.key, hello(1).model_dump_json()]
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(FOLLOWER), *arguments])
        try:
            leader = made.leader()
            leader.tell({"kind": "step"})
            process.send_signal(number)
            assert made.faults.get(timeout=LIMIT).reason == reason
            with pytest.raises(ProcessLost, match=reason):
                leader.tell({"kind": "step"})
        finally:
            process.kill()
            process.wait()
