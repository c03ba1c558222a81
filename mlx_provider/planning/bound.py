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
    read = max(
        _read_bytes(group, rank, context, rows) / rank.machine.chip.bytes for rank in group.ranks
    )
    return read, collective_seconds(group, link, rows, drawn=rows)


def _read_bytes(group: Group, rank: Rank, context: int, rows: int) -> float:
    cached = rank.need.per_row + rank.need.kv_per_token * context
    return group.share.read_by(rows) + rows * cached


def prompt_seconds(group: Group, link: Link, fields: Fields, context: int) -> tuple[float, float]:
    """Of a prompt of so many tokens, in chunks as the engine's when idle: compute, collectives."""
    ranks = len(group.ranks)
    pairs = _pair_products(fields, group) * context**2 / 2 / ranks
    computed = max(
        max(
            group.share.products * context / rank.machine.chip.products
            + pairs / rank.machine.chip.attention,
            group.share.read / rank.machine.chip.bytes,
        )
        for rank in group.ranks
    )
    chunks = ceil(context / MAX_CHUNK)
    even = collective_seconds(group, link, context / chunks, drawn=0)
    return computed, chunks * even


def collective_seconds(group: Group, link: Link, tokens: float, drawn: int) -> float:
    """Of all collectives of a pass over `tokens`, of which `drawn` give a new token."""
    ranks = len(group.ranks)
    if ranks == 1:
        return 0.0
    took = group.split.sums * link.collective(ranks, tokens * group.sum_bytes)
    if drawn:
        took += link.collective(ranks, drawn * TOKEN_BYTES)
    if drawn and group.split.gathers_logits:
        took += link.collective(ranks, drawn * group.vocab * group.value)
    return took


def _pair_products(fields: Mapping[str, object], group: Group) -> float:
    """Operations of a new token and a cached one, over all ranks: keys and values, each once.

    By the keys and values that are kept, each of which serves all query heads of its group.
    """
    heads, kept = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    shared = heads / kept if isinstance(heads, int) and isinstance(kept, int) and kept else 1.0
    values = len(group.ranks) * group.ranks[0].need.kv_per_token / group.value
    return 2 * shared * values
