"""What the host reads between two passes with drafts of a head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from device_reads import check_no_reads, drafted_rows
from host_gap import SAMPLING
from mlx_provider.engine.speculation.speculation import source_of
from mlx_provider.records import DraftOptions
from mlx_provider_mtp import mlx_drafters

from . import test_assistant, test_dflash2
from .company import target

DRAFTERS = {drafter.name: drafter for drafter in mlx_drafters()}


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.sweep), 3])
@pytest.mark.parametrize(
    "sampling", [pytest.param("greedy", marks=pytest.mark.sweep), "temperature, top-p"]
)
@pytest.mark.parametrize("name", ["mtp", "dflash2", "assistant"])
def test_a_pass_with_drafts_is_launched_before_the_last_one_is_read(
    tiny: Callable[..., Any], tmp_path: Path, rows: int, sampling: str, name: str
) -> None:
    options = DraftOptions(model=tmp_path / "d")
    if name == "mtp":
        found = tiny("qwen3_5_text")
    elif name == "dflash2":
        found = target(tiny)
        test_dflash2.made(tmp_path / "d")
    else:
        found = tiny("gemma4_text", mtp_num_hidden_layers=0)
        test_assistant.made(tmp_path / "d")
    drafting = DRAFTERS[name].start(found.folder, found.model, options)
    source = source_of(DRAFTERS[name], drafting, found.model)
    check_no_reads(drafted_rows(found.model, source, rows, SAMPLING[sampling]), rows)
