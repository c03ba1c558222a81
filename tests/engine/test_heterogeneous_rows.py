"""Ranks with different parts of a row: their common values, and the rows that can share a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from mlx_provider import LoadOptions
from mlx_provider.engine.execution.probe import stand_in
from mlx_provider.engine.execution.row_groups import Groups
from mlx_provider.engine.execution.solo_rows import prefilled
from mlx_provider.engine.heterogeneous import compare_parts
from mlx_provider.engine.memory import MemoryProfile
from mlx_provider.engine.prefix_cache.layer_kinds import Kind
from mlx_provider.engine.replication import OneProcess
from mlx_provider.errors import LoadFailed
from mlx_provider.families.text import load_text
from mlx_provider.records import LoadedModel
from mlx_provider.testing.tiny import build


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_text(build(tmp_path_factory.mktemp("m") / "q", "qwen3"), LoadOptions())


class Beside(OneProcess):
    """Another rank, whose value is `other(value of this rank)`."""

    def __init__(self, other: Callable[[Any], Any]) -> None:
        self._other = other

    def gather(self, own: Any) -> list[Any]:
        return [own, self._other(own)]


def test_ranks_with_equal_parts_need_no_common_values(model: LoadedModel) -> None:
    assert compare_parts(model, model.make_cache, Beside(lambda own: own)) is None


def test_all_ranks_use_the_largest_and_smallest_values(model: LoadedModel) -> None:
    state = {"state_bytes": 900, "token_bytes": 8, "windows": [[16, 4]]}
    cannot = dict.fromkeys(("mergeable", "shares_a_pass", "divisible"), False)
    told = {"layers": 1, "kind": 2, "memory": state, **cannot}
    found = compare_parts(model, model.make_cache, Beside(lambda own: told))
    assert found is not None
    per_token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, dimensions, bytes
    assert found.memory == MemoryProfile(900, per_token, ((16, 4),))
    assert found.kind is Kind.STATE
    assert (found.mergeable, found.shares_a_pass, found.divisible) == (False, False, False)


def test_all_ranks_learn_that_one_cannot_run_its_share(model: LoadedModel) -> None:
    with pytest.raises(LoadFailed, match="no room"):
        compare_parts(model, model.make_cache, Beside(lambda own: "no room"))


@dataclass(frozen=True)
class Joining:
    memory: MemoryProfile
    mergeable: bool = True


@pytest.mark.parametrize(
    ("joining", "groups"),
    [
        (None, 1),
        (Joining(MemoryProfile(0, 1)), 1),
        (Joining(MemoryProfile(0, 2**20)), 2),
        (Joining(MemoryProfile(0, 1), mergeable=False), 2),
    ],
)
def test_rows_share_a_group_if_every_rank_permits_it(
    joining: Joining | None, groups: int, model: LoadedModel
) -> None:
    rows = Groups(2**22, joining)
    for tokens in ([1, 2, 3], [4, 5, 6, 7]):
        rows.add(stand_in(tokens, 0), prefilled(model, model.make_cache, tokens))
    assert len(rows.groups) == groups
