"""The memory limit for the images of all requests, shared between tenants."""

from __future__ import annotations

from ...byte_gate import ByteGate, Ticket
from ...errors import MLXProviderError, Overloaded


class MediaRoom:
    """Limits on images that are decoded, and on images that requests hold until they end. Separate,
    because decoding never waits for another request, and only the engine frees the second. Safe
    from any thread."""

    def __init__(self, capacity: int, line: int = 256) -> None:
        """`line`: requests of one tenant that may wait. Each occupies a thread."""
        self.line = line
        self.decoding = ByteGate(capacity // 2)
        self._kept = ByteGate(capacity - capacity // 2)

    @property
    def held(self) -> int:
        return self.decoding.held + self._kept.held

    def claim(self, who: str, owner: str = "") -> MediaClaim:
        """The caller must close it."""
        return MediaClaim(self, self._kept, who, owner)

    def refuse(self, error: MLXProviderError, who: str | None = None) -> None:
        for gate in (self._kept, self.decoding):
            gate.refuse(error, who)


class MediaClaim:
    """Encoded images of one request, and images scaled for the model until its prefill ends."""

    def __init__(self, room: MediaRoom, kept: ByteGate, who: str, owner: str) -> None:
        self.room = room
        self.who = who
        self.owner = owner
        self._kept = kept
        self._ticket: Ticket | None = None
        self._encoded = 0

    def take(self, encoded: int, scaled: int) -> None:
        """Wait for memory. Raises `Overloaded` if too many requests wait, else the error given to
        `refuse`."""
        self.close()  # a prompt that is prepared again starts with an empty claim
        self._encoded = encoded
        if self._kept.waiting(self.owner) >= self.room.line:
            raise Overloaded(f"{self.room.line} requests wait for room for their images, the limit")
        self._ticket = self._kept.ask(encoded + scaled, self.owner, self.who)
        self._ticket.wait()

    def decoding(self, nbytes: int) -> Ticket:
        return self.room.decoding.ask(nbytes, self.owner, self.who)

    def prefilled(self) -> None:
        if self._ticket is not None:
            self._ticket.keep(self._encoded)

    def close(self) -> None:
        if self._ticket is not None:
            self._ticket.close()
