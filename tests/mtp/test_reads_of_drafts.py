"""What the host reads between two passes with drafts of a head."""

from collections.abc import Callable
from typing import Any

import pytest

from device_reads import check_no_other_reads, drafted_rows
from host_gap import SAMPLING
from mlx_provider.engine.speculation.speculation import source_of
from mlx_provider.records import DraftOptions
from mlx_provider_mtp import mlx_drafters


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.sweep), 3])
@pytest.mark.parametrize("sampling", ["temperature, top-p"])
def test_drafts_of_a_head_are_verified_without_a_read_by_the_host(
    tiny: Callable[..., Any], rows: int, sampling: str
) -> None:
    found, (drafter,) = tiny("qwen3_5_text"), mlx_drafters()
    drafting = drafter.start(found.folder, found.model, DraftOptions())
    source = source_of(drafter, drafting, found.model)
    check_no_other_reads(drafted_rows(found.model, source, rows, SAMPLING[sampling]), rows)
