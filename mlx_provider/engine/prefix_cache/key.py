"""Keys of prefixes: the model's key, and token ids in which content hashes replace images."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...records import Prompt

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class CacheKey:
    """What determines the KV besides the tokens. Entries of different keys never match."""

    fingerprint: str
    """`ModelInfo.fingerprint`: weights, adapter, quantisation, sliding window."""
    kv: str = ""
    """The kind of the KV cache (its quantisation), and the code that computes it."""
    salt: str = ""
    """Tenant. Entries of one salt are invisible to all others."""
    exact: bool = False
    """Whether entries must come back from disk bit for bit, whatever the operator chose."""

    def digest(self) -> bytes:
        """16 bytes. The salt cannot be recovered from it."""
        text = "\0".join((self.fingerprint, self.kv, self.salt))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def key_tokens(prompt: Prompt) -> list[int]:
    """The prompt's token ids, with negative ids in place of each media span. They derive from the
    item's content hash and the span's length, so another item ends a match at its first token. The
    first id of a span is even, all others are odd."""
    ids = list(prompt.tokens)
    for span in prompt.spans:
        length = span.end - span.start
        seed = hashlib.sha256(f"{span.content_hash}\0{length}".encode()).digest()
        first = -2 * (1 + (int.from_bytes(seed[:8], "little") >> 3))
        ids[span.start : span.end] = [first, *([first - 1] * (length - 1))][:length]
    return ids


def as_ids(tokens: Sequence[int] | Ids) -> Ids:
    """An int64 array is returned without a copy."""
    return np.asarray(tokens, dtype=np.int64)


def outside_spans(ids: Ids, at: int) -> int:
    """The largest position <= `at` that is not inside a media span."""
    if at >= len(ids) or ids[at] >= 0 or ids[at] % 2 == 0:
        return at
    before = ids[:at]
    starts = np.flatnonzero((before < 0) & (before % 2 == 0))
    return int(starts[-1]) if len(starts) else 0
