"""What the host reads between two passes with drafts of a smaller model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from device_reads import check_no_other_reads, drafted_rows
from host_gap import SAMPLING
from mlx_provider import LoadOptions
from mlx_provider.engine.speculation.speculation import Source
from mlx_provider.families.text import TextModel, load_text
from mlx_provider_drafters.draft_model import DraftModel


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_drafts_of_a_model_are_verified_without_a_read_by_the_host(
    qwen3: TextModel, folder: Callable[..., Path], rows: int, sampling: str
) -> None:
    small = load_text(folder("qwen3", seed=4, num_hidden_layers=2), LoadOptions())
    drafting = DraftModel(small, qwen3.info.vocab_size)
    engine = drafted_rows(qwen3, Source(drafting), rows, SAMPLING[sampling])
    check_no_other_reads(engine, rows)
