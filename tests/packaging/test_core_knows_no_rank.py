"""Without the plugin `ranks` the core does not know the word: it has processes of a group."""

from __future__ import annotations

import re
from pathlib import Path

CORE = Path(__file__).parents[2] / "mlx_provider"
RANK = re.compile(r"(?<![a-z])ranks?(?![a-z])|Ranks?(?![a-z])", re.ASCII)
ELSEWHERE = {
    # which of several records of plugins is preferred
    "records/drafter.py": r"Rank of the drafter",
    "records/kernels.py": r"^rank: int = 0|highest rank",
    "records/parsing.py": r"^rank: int = 0|highest rank",
    "registry/contents.py": r'"rank"|: rank is',
    "registry/registry.py": r"equal rank|\.rank\b",
    # of a matrix
    "families/config_sizes.py": r'"rank", "r"',
    "families/estimate.py": r"_low_rank_dim|kv_lora_rank|return rank, ",
    "testing/tiny/configs.py": r"_low_rank_dim|_lora_rank",
    # a method of `mlx.core.distributed.Group`
    "families/sharding.py": r"group\.rank\(\)",
    "families/vision/loading.py": r"group\.rank\(\)",
}
"""The only lines with the word, and its other meanings there."""


def test_the_core_knows_no_rank() -> None:
    found = []
    for path in sorted(CORE.rglob("*.py")):
        name = path.relative_to(CORE).as_posix()
        other = re.compile(ELSEWHERE.get(name, r"(?!)"))
        lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
        found += [
            f"{name}: {each}" for each in lines if RANK.search(each) and not other.search(each)
        ]
        assert not RANK.search(path.stem), name
    assert found == []


def test_the_word_is_found_in_every_form() -> None:
    for each in ("rank", "RankLost", "LoadingRanks", "_ranks", "rank_text", "any_rank"):
        assert RANK.search(each), each
    for each in ("rerank", "Reranker", "outranks", "low-ranked", "frank"):
        assert not RANK.search(each), each
