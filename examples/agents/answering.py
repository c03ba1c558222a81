"""A process of the gateway, which must go on answering."""

import time
from pathlib import Path

import httpx

from mlx_provider.errors import EngineUnavailable

EVERY = 1.0
"""Seconds between two checks."""
ASK = 5.0
"""Seconds that one question may take, so that whoever asks can look at other things meanwhile."""
HUNG = 120.0
"""Seconds without an answer after which a process counts as hung; a busy machine takes tens."""
LINES = 20
"""Lines at the end of a log that are shown."""


class Answering:
    """Asks one process by HTTP, and tells a slow one from one that is gone."""

    def __init__(self, name: str, log: Path, path: str, url: str, socket: Path | None = None):
        """`path`: the question of `check`. `socket`: the unix socket of the process, if any."""
        self.log = log
        self._name = name
        self._path = path
        transport = httpx.HTTPTransport(verify=False, uds=str(socket) if socket else None)
        self._client = httpx.Client(base_url=url, transport=transport, timeout=ASK)
        self._next = 0.0
        self._silent_since: float | None = None

    def check(self) -> None:
        """Ask, but not more often than `EVERY`. Raises as `ask`."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY
            self.ask(self._path)

    def ask(self, path: str) -> bytes | None:
        """The body of the answer; `None`: no answer this time.

        Raises `EngineUnavailable`, with the end of the log, where the process is gone or hangs.
        """
        asked = time.monotonic()
        try:
            answer = self._client.get(path)
        except httpx.TransportError as error:
            self._missed(error, asked)
            return None
        self._silent_since = None
        return answer.content

    def gone(self, what: str) -> EngineUnavailable:
        """The error that says what became of the process, with the end of its log."""
        text = self.log.read_text(errors="replace") if self.log.is_file() else ""
        lines = [line for line in text.splitlines() if f"GET {self._path} " not in line]
        return EngineUnavailable(
            "\n".join([f"the {self._name} {what}; its log ends:", *lines[-LINES:]])
        )

    def close(self) -> None:
        self._client.close()

    def _missed(self, error: httpx.TransportError, asked: float) -> None:
        if self._silent_since is None:
            self._silent_since = asked
        hung = time.monotonic() - self._silent_since >= HUNG
        if hung or isinstance(error, httpx.ConnectError):  # nobody listens any more
            raise self.gone(f"does not answer ({error!r})") from None
