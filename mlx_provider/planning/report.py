"""A plan as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .group import Rank
from .plan import Outlook, Plan

NATURE = (
    "an estimate: bytes by the model's class, speed as a bound from bandwidth, compute and link; "
    "nothing was run"
)


def as_json(found: Plan) -> dict[str, Any]:
    """Bytes, seconds and tokens a second, each with what it stands on."""
    return {
        "model": found.subject.name,
        "nature": NATURE,
        "context": found.load.context,
        "rows": found.load.rows,
        "link": {
            "name": found.link.name,
            "seconds": found.link.seconds,
            "bytes_per_second": found.link.bytes,
        },
        "machines": _outlook(found, found.all),
        "alone": _outlook(found, found.alone),
        "verdict": found.verdict,
        "basis": list(basis(found)),
    }


def basis(found: Plan) -> Iterator[str]:
    """What the figures stand on, a line for each machine and the link."""
    machines = {rank.machine.name: rank.machine.basis for rank in found.all.group.ranks}
    yield from (f"{name}: {told}" for name, told in machines.items())
    if len(found.all.group.ranks) > 1:
        yield f"{found.link.name}: {found.link.basis}"


def _outlook(found: Plan, of: Outlook) -> dict[str, Any]:
    group = of.group
    return {
        "fits": of.fits,
        "context_that_fits": of.longest,
        "split_by": group.split_by,
        "ranks": [_rank(found, of, rank) for rank in group.ranks],
        "collectives": {
            "per_step": group.collectives,
            "all_sums": group.split.sums,
            "hand_overs": group.split.handed,
            "gathers_logits": group.split.gathers_logits,
            "bytes_per_token": group.token_bytes,
            "bytes_per_prompt_token": group.prompt_token_bytes,
            "sent_per_rank_and_token": group.sent(found.link),
        },
        "decode": {
            "tokens_per_second": of.tokens_per_second,
            "reading_seconds": of.reading,
            "collective_seconds": of.exchanging,
        },
        "prefill": {
            "seconds": of.prompt_seconds,
            "computing_seconds": of.prompt_computing,
            "collective_seconds": of.prompt_exchanging,
        },
    }


def _rank(found: Plan, of: Outlook, rank: Rank) -> dict[str, Any]:
    share, load = rank.share, found.load
    return {
        "rank": rank.number,
        "machine": rank.machine.name,
        "memory_for_mlx": rank.machine.room,
        "layers": len(of.group.split.layers[rank.number]) if of.group.split.layers else None,
        "weights": rank.weights,
        "weights_split": share.split,
        "weights_replicated": share.replicated,
        "weights_of_towers": share.tower if rank.number == 0 else 0,
        "kv_per_token": rank.need.kv_per_token,
        "state_per_request": rank.need.per_row,
        "requests": rank.takes(load.context, load.rows) - rank.weights,
        "fits": rank.fits(load.context, load.rows),
    }
