"""What the host reads between two passes with drafts of a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from device_reads import check_no_reads, drafted_rows
from host_gap import SAMPLING
from mlx_provider.records import DraftOptions
from mlx_provider_mtp import start


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_pass_with_drafts_is_launched_before_the_last_one_is_read(
    tiny: Callable[..., Any], rows: int, sampling: str
) -> None:
    found = tiny("qwen3_5_text")
    head = start(found.folder, found.model, DraftOptions())
    engine = drafted_rows(found.model, head, rows, SAMPLING[sampling], found.model)
    check_no_reads(engine, rows)
