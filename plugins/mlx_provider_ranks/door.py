"""Admits followers at the start, and no other connections."""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from mlx_provider.errors import ProcessLost

from .framing import LONGEST_BEFORE, BadFrame, Frames
from .messages import Hello

AT_ONCE = 64
"""Connections that have shown no key yet; of more, the oldest is dropped."""
GREETING_LIMIT = 5.0
"""Seconds in which one shows it."""
TICK = 0.25


@dataclass(eq=False)
class Caller:
    """A connection before its key was checked, or the result of the check."""

    sock: socket.socket
    came: float
    frames: Frames = field(default_factory=lambda: Frames(LONGEST_BEFORE))


@dataclass(frozen=True)
class Guest:
    """An admitted follower."""

    sock: socket.socket
    hello: Hello


class Door:
    """Admits one connection with the key for each of the ranks 1 to `size` - 1."""

    def __init__(
        self, listener: socket.socket, key: str, size: int, clock: Callable[[], float]
    ) -> None:
        self._listener = listener
        self._key = key
        self._missing = set(range(1, size))
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._callers: dict[Caller, None] = {}
        self.guests: dict[int, Guest] = {}

    def wait(self, limit: float) -> list[Guest]:
        """All followers, by rank. Raises `ProcessLost` if one is missing after `limit` seconds."""
        deadline = self._clock() + limit
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        with ExitStack() as undo, closing(self):
            undo.callback(self._send_away)
            while self._missing:
                if self._clock() > deadline:
                    raise ProcessLost(f"{_named(self._missing)} did not come within {limit:g} s")
                self._turn()
            undo.pop_all()
        return [self.guests[rank] for rank in sorted(self.guests)]

    def _send_away(self) -> None:
        for guest in self.guests.values():
            guest.sock.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(TICK):
            if key.data is None:
                self._accept()
            elif isinstance(key.data, Guest):
                raise ProcessLost(
                    f"rank {key.data.hello.rank} on {key.data.hello.host} left at start"
                )
            elif key.data in self._callers:  # not dropped in this iteration
                self._listen_to(key.data)
        now = self._clock()
        for caller in [each for each in self._callers if now - each.came > GREETING_LIMIT]:
            self._drop(caller)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has left, or this process has no free descriptor: continue with others
            time.sleep(0.001)
            return
        sock.setblocking(False)
        caller = Caller(sock, self._clock())
        self._callers[caller] = None
        self._selector.register(sock, selectors.EVENT_READ, caller)
        if len(self._callers) > AT_ONCE:
            self._drop(next(iter(self._callers)))

    def _listen_to(self, caller: Caller) -> None:
        try:
            data = caller.sock.recv(LONGEST_BEFORE)
            messages = list(caller.frames.take(data)) if data else [None]
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            self._drop(caller)
            return
        if messages:
            self._greeted(caller, messages[0])

    def _greeted(self, caller: Caller, message: dict[str, Any] | None) -> None:
        hello = self._let_in(message or {})
        if hello is None:
            self._drop(caller)
            return
        guest = Guest(caller.sock, hello)
        del self._callers[caller]
        self._selector.modify(caller.sock, selectors.EVENT_READ, guest)
        self._missing.discard(hello.rank)
        self.guests[hello.rank] = guest

    def _let_in(self, message: dict[str, Any]) -> Hello | None:
        shown = message.get("key")
        if not isinstance(shown, str) or not hmac.compare_digest(
            shown.encode(), self._key.encode()
        ):
            return None
        try:
            hello = Hello.model_validate(message.get("hello"))
        except ValidationError:
            return None
        return hello if hello.rank in self._missing else None

    def _drop(self, caller: Caller) -> None:
        del self._callers[caller]
        self._selector.unregister(caller.sock)
        caller.sock.close()

    def close(self) -> None:
        for caller in list(self._callers):
            self._drop(caller)
        self._selector.close()
        self._listener.close()


def _named(ranks: set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
