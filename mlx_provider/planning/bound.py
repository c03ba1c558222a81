"""How fast a group can be at best: by the memory of its ranks, their compute, and the link.

A pass waits for its slowest rank and then for each collective; nothing runs beside anything else,
and nothing of the host counts. So a real group is slower, most of all with short passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from ..families.estimate import Fields
from ..testing.device_curves import MAX_CHUNK
from .group import TOKEN_BYTES, Group, Rank
from .links import Link


def step_seconds(group: Group, link: Link, context: int, rows: int) -> tuple[float, float]:
    """Of a step that draws a token for each of `rows`: reading memory, and collectives."""
    drawn = [rank.share.head / rank.machine.chip.bytes for rank in group.ranks]
    each = [rank.read_bytes(context, rows) / rank.machine.chip.bytes for rank in group.ranks]
    if group.split.layers:  # all ranks draw from what they have gathered
        read = sum(each) + max(drawn)
    else:
        read = max(map(sum, zip(each, drawn, strict=True)))
    return read, collective_seconds(group, link, rows, drawn=rows)


def prompt_seconds(group: Group, link: Link, fields: Fields, context: int) -> tuple[float, float]:
    """Of a prompt of so many tokens, in chunks as the engine's when idle: compute, collectives."""
    heads = _heads_of_each(fields)
    each = [_prompt_seconds(group, rank, heads, context) for rank in group.ranks]
    computed = sum(each) if group.split.layers else max(each)
    chunks = ceil(context / MAX_CHUNK)
    even = collective_seconds(group, link, context / chunks, drawn=0)
    return computed, chunks * even


def _prompt_seconds(group: Group, rank: Rank, heads: float, context: int) -> float:
    """Of one rank, whose pairs of a new token and a cached one are as many as what it keeps."""
    pairs = 2 * heads * rank.need.kv_per_token / group.value * context**2 / 2
    chip = rank.machine.chip
    computed = rank.share.products * context / chip.products + pairs / chip.attention
    return max(computed, (rank.share.read + rank.share.head) / chip.bytes)


def collective_seconds(group: Group, link: Link, tokens: float, drawn: int) -> float:
    """Of all collectives of a pass over `tokens`, of which `drawn` give a new token."""
    ranks = len(group.ranks)
    if ranks == 1:
        return 0.0
    state = tokens * group.sum_bytes
    took = group.split.sums * link.collective(ranks, state)
    if group.split.layers:
        took += group.split.handed * link.collective(2, state) + link.gathered(ranks, state)
    if drawn:
        took += link.collective(ranks, drawn * TOKEN_BYTES)
    if drawn and group.split.gathers_logits:
        took += link.collective(ranks, drawn * group.vocab * group.value)
    return took


def _heads_of_each(fields: Mapping[str, object]) -> float:
    """Query heads that each key and value that is kept serves."""
    heads, kept = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    return heads / kept if isinstance(heads, int) and isinstance(kept, int) and kept else 1.0
