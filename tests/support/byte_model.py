"""A tiny byte-level vocabulary for a model that writes random text under a grammar."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlx_provider.chat.constraints.compiler import GrammarCompiler
from mlx_provider.chat.output.whole_reply import read_chunks
from mlx_provider.records import ReasoningParser, ToolParser
from mlx_provider.testing.conformance.calls import TEXT, ByteModel, Called, function

MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>"]
WORDS = ['{"', '": ', '", "', "name", "arguments", "true", "ing", "\n  ", "}}", " the", '"]']
ENDS = ["<|im_end|>", "<|endoftext|>"]
GREP = function(
    *("grep", "pattern", "mode"),
    pattern=TEXT | {"maxLength": 6, "pattern": "^[a-z]+$"},
    count={"type": "integer", "minimum": 0, "maximum": 99},
    mode={"enum": ["all", "first"]},
)
SHORT = TEXT | {"maxLength": 3}
TO = {"type": "object", "properties": {"id": SHORT}}
MOVE = function("move", **{"from": SHORT}, to=TO, how={"enum": ["fast", 2, None]})
"""All parameters are optional, and one key is a Python keyword."""


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


def byte_model(first: Sequence[str] = ()) -> ByteModel:
    """The output matrix has more rows than the tokenizer has entries, as usual."""
    tokenizer = byte_tokenizer(first)
    eos = frozenset(tokenizer.token_to_id(end) for end in ENDS)
    rows = tokenizer.get_vocab_size() + 37
    return ByteModel(tokenizer, eos, rows, GrammarCompiler(tokenizer, eos, rows))


def read(
    text: str, parser: ToolParser, tools: Sequence[Any], thoughts: ReasoningParser | None = None
) -> tuple[list[Called], str]:
    found = read_chunks([text], tools=tools, tool_parser=parser, reasoning_parser=thoughts)
    return [*found.whole_calls, *found.cut_calls], (found.content + found.reasoning).strip()
