"""Turn-end markers that models write as text after their calls."""

from __future__ import annotations

TURN_ENDS = (
    *("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "</s>"),
    *("<|end|>", "<|return|>", "<|call|>", "<|eom|>", "<|eot|>", "<|EOT|>", "<|eos|>", "<eos>"),
    *("<end_of_turn>", "<turn|>", "<start_function_response>", "<|tool_response>", "<|eoa|>"),
    *("<|message_sep|>", "<|observation|>", "<|user|>", "<|end_of_sentence|>", "<seed:eos>"),
    *("<｜end▁of▁sentence｜>", "<｜hy_eos｜>", "<｜hy_eos:opensource｜>", "<|assistant_end|>"),
    *("<|END_OF_TURN_TOKEN|>", "</longcat_s>", "[e~[", "[EOS]", "[|endofturn|]"),
    *("<|endofresponse|>", "<|end_of_role|>"),
)
"""Of all families: models of one family learn the calls of another."""
