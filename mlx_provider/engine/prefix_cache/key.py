"""What a prefix is known by: the model's key, and token ids with images named by content."""

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
    """What the model saw apart from tokens. Entries of different keys never meet."""

    fingerprint: str
    """`ModelInfo.fingerprint`: weights, adapter, quantisation, sliding window."""
    kv: str = ""
    """How the KV cache itself is kept (its quantisation), and by whose code it is computed."""
    salt: str = ""
    """Tenant: entries of one salt are invisible to every other."""
    exact: bool = False
    """Entries come back from disk bit for bit, whatever the operator has chosen."""

    def digest(self) -> bytes:
        """Sixteen bytes that stand for this key on disk; the salt cannot be read back."""
        text = "\0".join((self.fingerprint, self.kv, self.salt))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def key_tokens(prompt: Prompt) -> list[int]:
    """The prompt's token ids, with those of each media span replaced by negative ids.

    The ids derive from the item's content hash and the span's length, so another item ends a
    match at its first token. The first id of a span is even, all others are odd.
    """
    ids = list(prompt.tokens)
    for span in prompt.spans:
        length = span.end - span.start
        seed = hashlib.sha256(f"{span.content_hash}\0{length}".encode()).digest()
        first = -2 * (1 + (int.from_bytes(seed[:8], "little") >> 3))
        ids[span.start : span.end] = [first, *([first - 1] * (length - 1))][:length]
    return ids


def as_ids(tokens: Sequence[int] | Ids) -> Ids:
    """Tokens as an int64 array; an int64 array is returned as it is, without a copy."""
    return np.asarray(tokens, dtype=np.int64)


def outside_spans(ids: Ids, at: int) -> int:
    """The largest position <= `at` that is not inside a media span (its start is outside)."""
    if at >= len(ids) or ids[at] >= 0 or ids[at] % 2 == 0:
        return at
    before = ids[:at]
    starts = np.flatnonzero((before < 0) & (before % 2 == 0))
    return int(starts[-1]) if len(starts) else 0
