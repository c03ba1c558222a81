"""`bench router` on a real router; that it is fast is for whoever runs it to see."""

from __future__ import annotations

import pytest

from litellm_router import COLUMNS
from mlx_provider.errors import BadRequest


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # LiteLLM's own
def test_a_row_for_each_number_of_engines(benchmark_here) -> None:
    result = benchmark_here("router", "--engines", "3", "--engines", "9", "--sessions", "20")
    three, nine = result["rows"]
    assert (three["engines"], nine["engines"]) == (3, 9)
    for row in (three, nine):
        assert set(COLUMNS.values()) <= row.keys()
        assert min(row["new_ms"], row["pinned_ms"]) > 0
        assert 100 < row["session_bytes"] < 5_000
        assert row["engine_bytes"] > 1_000
        assert row["items"] > 200, "our hook has widened LiteLLM's cache"
    assert result["plan"]["redis"] is False


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "http://127.0.0.1"])
def test_a_redis_that_is_none_is_told(benchmark_here, url: str) -> None:
    with pytest.raises(BadRequest, match="no Redis answers"):
        benchmark_here("router", "--redis", url)
