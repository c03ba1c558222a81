"""Ends of turns that a model spells out as text behind its calls."""

from __future__ import annotations

from collections.abc import Sequence

from .reading import Reading, TextReader

TURN_ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "</s>"),
    *("<|end|>", "<|return|>", "<|call|>", "<|eom|>", "<|eot|>", "<|EOT|>", "<|eos|>", "<eos>"),
    *("<end_of_turn>", "<turn|>", "<start_function_response>", "<|tool_response>", "<|eoa|>"),
    *("<|message_sep|>", "<|observation|>", "<|user|>", "<|end_of_sentence|>", "<seed:eos>"),
    *("<｜end▁of▁sentence｜>", "<｜hy_eos｜>", "<|END_OF_TURN_TOKEN|>", "<|assistant_end|>"),
    *("</longcat_s>", "[e~[", "[EOS]", "[|endofturn|]", "<|endofresponse|>", "<|end_of_role|>"),
)
"""Of all families at once: models of one family learn the calls of another."""


def read_turn_ends(reader: TextReader, openers: Sequence[str]) -> Reading[str]:
    """Read ends of turns that directly follow a call; anywhere else they are text.

    An opener that begins like one of them is left alone. Returns the white space before what
    comes next.
    """
    while True:
        space = yield from reader.space()
        found = yield from reader.at(*TURN_ENDS, *openers)
        if not found or found in openers:
            return space
        reader.skip(len(found))
