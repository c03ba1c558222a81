"""A tiny byte-level vocabulary, and a model that writes random text under a grammar."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ..chat.constraints.compiler import Constraint, GrammarCompiler
from ..chat.constraints.thoughts import AfterThoughts
from ..protocol.requests import GenerateRequest
from ..records import CallGrammar

MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>"]
WORDS = ['{"', '": ', '", "', "name", "arguments", "true", "ing", "\n  ", "}}", " the", '"]']
ENDS = ["<|im_end|>", "<|endoftext|>"]

Holds = Constraint | AfterThoughts


def byte_tokenizer(first: Sequence[str] = ()) -> Tokenizer:
    """`first`: special tokens at the ids from 0, where many real vocabularies have theirs."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
    entries = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {entry: i for i, entry in enumerate(entries)}
    merges = []
    for word in WORDS:
        pieces = list("".join(piece for piece, _ in letters.pre_tokenize_str(word)))
        for end in range(2, len(pieces) + 1):
            joined = "".join(pieces[:end])
            if joined not in vocab:
                vocab[joined] = len(vocab)
                merges.append(("".join(pieces[: end - 1]), pieces[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*first, *ENDS])
    tokenizer.add_tokens([AddedToken(marker, special=False) for marker in MARKERS])
    return tokenizer


@dataclass
class ByteModel:
    """Draws at temperature 1 from what a grammar allows."""

    tokenizer: Tokenizer
    eos: frozenset[int]
    rows: int
    compiler: GrammarCompiler

    def request(self, **given: Any) -> GenerateRequest:
        return GenerateRequest(model="m", messages=[{"role": "user", "content": "x"}], **given)

    def started(self, calls: CallGrammar | None = None, **given: Any) -> Holds:
        structure = self.compiler.structure(self.request(**given), calls)
        assert structure is not None
        return structure.constraint

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def allowed(self, constraint: Holds) -> list[int]:
        bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
        return [int(token) for token in np.flatnonzero(bits)]

    def allows(self, constraint: Holds, token: int) -> bool:
        return bool(constraint.mask()[token // 32] >> token % 32 & 1)

    def accepts(self, constraint: Holds, text: str) -> bool:
        for token in self.encode(text):
            if not self.allows(constraint, token):
                return False
            constraint.advance(token)
        return any(self.allows(constraint, token) for token in self.eos)

    def sample(self, constraint: Holds, seed: int, limit: int) -> tuple[str, bool]:
        chance = random.Random(seed)  # noqa: S311
        tokens: list[int] = []
        while len(tokens) < limit and not constraint.finished:
            token = chance.choice(self.allowed(constraint))
            if token in self.eos:
                return self.decode(tokens), True
            constraint.advance(token)
            tokens.append(token)
        return self.decode(tokens), constraint.finished


def byte_model(first: Sequence[str] = ()) -> ByteModel:
    """The output matrix has more rows than the tokenizer has entries, as usual."""
    tokenizer = byte_tokenizer(first)
    eos = frozenset(tokenizer.token_to_id(end) for end in ENDS)
    rows = tokenizer.get_vocab_size() + 37
    return ByteModel(tokenizer, eos, rows, GrammarCompiler(tokenizer, eos, rows))
