"""The memory that images of all requests may take together."""

from __future__ import annotations

from ...byte_gate import ByteGate, Ticket
from ...errors import MLXProviderError, Overloaded


class MediaRoom:
    """Two bounds: on what is being decoded, and on what requests hold until they have ended.

    They are apart because the first never waits for anybody, while the second is given back by
    the engine alone. Any thread.
    """

    def __init__(self, capacity: int, line: int = 256) -> None:
        """`line`: requests that may wait; each keeps a thread."""
        self.line = line
        self.decoding = ByteGate(capacity // 2)
        self._kept = ByteGate(capacity - capacity // 2)

    @property
    def held(self) -> int:
        """Bytes in use."""
        return self.decoding.held + self._kept.held

    def claim(self, owner: str) -> MediaClaim:
        """What one request will hold; to be closed."""
        return MediaClaim(self, self._kept, owner)

    def refuse(self, error: MLXProviderError, owner: str | None = None) -> None:
        """End the waiting of a request, or of all."""
        for gate in (self._kept, self.decoding):
            gate.refuse(error, owner)


class MediaClaim:
    """One request's images: as they came, and scaled for the model until its prefill is done."""

    def __init__(self, room: MediaRoom, kept: ByteGate, owner: str) -> None:
        self.room = room
        self.owner = owner
        self._kept = kept
        self._ticket: Ticket | None = None
        self._encoded = 0

    @property
    def used(self) -> bool:
        return self._ticket is not None

    def take(self, encoded: int, scaled: int) -> None:
        """Wait for room. Raises `Overloaded` behind too many, else what the wait is ended with."""
        self.close()  # a prompt that is prepared again begins anew
        self._encoded = encoded
        if self._kept.waiting >= self.room.line:
            raise Overloaded(f"{self.room.line} requests wait for room for their images, the limit")
        self._ticket = self._kept.ask(encoded + scaled, self.owner)
        self._ticket.wait()

    def prefilled(self) -> None:
        """The scaled images are let go."""
        if self._ticket is not None:
            self._ticket.keep(self._encoded)

    def close(self) -> None:
        """All of it is let go. Idempotent."""
        if self._ticket is not None:
            self._ticket.close()
