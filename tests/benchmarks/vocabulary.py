"""A byte-level BPE tokenizer as large as a real one's, made without training data."""

from __future__ import annotations

import json
import random
from pathlib import Path

LONGEST = 12
"""Characters of one token."""
PUNCTUATION = ('":', '","', '"}', '{"', '"]', '["', "},", "}}", "],", "0.", '":"', "\\n")


def widen(folder: Path, size: int, seed: int = 0) -> None:
    """Replace a model folder's tokenizer by one of `size` entries with the same special tokens.

    Merges join random earlier tokens of letters, digits and spaces, so that the vocabulary is a
    tree of prefixes as of real text; that is what the cost of a grammar's mask depends on.
    """
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    kept = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    first = [token for token, at in sorted(kept.items(), key=lambda item: item[1])]
    vocab, merges = _vocabulary(size - len(first), seed)
    ids = {token: at for at, token in enumerate([*first, *vocab])}
    tokenizer["added_tokens"] = [
        entry | {"id": ids[entry["content"]]} for entry in tokenizer["added_tokens"]
    ]
    tokenizer["model"] |= {"vocab": ids, "merges": merges}
    path.write_text(json.dumps(tokenizer))


def _vocabulary(size: int, seed: int) -> tuple[list[str], list[list[str]]]:
    """Tokens, single bytes first, and the merges that make the others."""
    from tokenizers import pre_tokenizers

    dice = random.Random(seed)
    single = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [c for c in single if c.isascii() and c.isalnum()]
    known = dict.fromkeys(single)
    words, merges = [*letters, "Ġ"], []
    for text in PUNCTUATION:
        for end in range(2, len(text) + 1):
            if text[:end] not in known:
                known[text[:end]] = None
                merges.append([text[: end - 1], text[end - 1]])
    while len(known) < size:
        left, right = dice.choice(words), dice.choice(words)
        joined = left + right
        if len(joined) > LONGEST or joined in known or "Ġ" in right:
            continue
        known[joined] = None
        merges.append([left, right])
        words.append(joined)
    return list(known), merges
