"""The output matrix is applied to the tokens whose logits are wanted, and to no others."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_provider import LoadOptions
from mlx_provider.families.caches import text_cache
from mlx_provider.families.logits import find_backbone, last_token, narrow_output, rows_at
from mlx_provider.families.text import load_text
from tiny import build
from tiny.configs import FAMILIES
from tolerances import logprob_tolerance

TEXT = ("llama", "qwen3", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_5_text", "nemotron_h",
        "jamba", "rwkv7", "llama4", "deepseek_v3", "afm7")  # fmt: skip
IDS = mx.array([[5, 6, 7, 8, 9]])


@pytest.mark.parametrize("family", TEXT)
def test_the_backbone_of_every_family_is_found(tmp_path: Path, family: str) -> None:
    assert family in {each.name for each in FAMILIES}
    made = load_text(build(tmp_path, family), LoadOptions())
    assert made.backbone is not None
    whole = made.model(IDS, cache=text_cache(made.model))
    found = narrow_output(made.model, made.backbone, last_token)(IDS, cache=text_cache(made.model))
    assert found.shape == (1, 1, whole.shape[-1])
    assert mx.allclose(found, whole[:, -1:], atol=logprob_tolerance())
    again = made.model(IDS, cache=text_cache(made.model))
    assert mx.array_equal(again, whole), "the model itself is as it was"


class Counting(nn.Module):
    """Notes how many tokens its output matrix sees."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Embedding(16, 8)
        self.seen: list[int] = []

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        hidden = self.model(ids)
        self.seen.append(hidden.shape[0] * hidden.shape[1])
        return self.model.as_linear(hidden)


def test_the_output_matrix_runs_only_for_tokens_with_wanted_logits() -> None:
    model = Counting()
    path = find_backbone(model, lambda each: each(IDS))
    assert path == ("model",)
    model.seen.clear()
    narrow_output(model, path, last_token)(IDS)
    narrow_output(model, path, rows_at(mx.array([0, 3])))(IDS.T)
    narrow_output(model, path, rows_at(None))(IDS.T)
    assert model.seen == [1, 2, 5]


class Mixing(Counting):
    """Has no part whose states alone give its logits."""

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        hidden = self.model(ids)
        return self.model.as_linear(hidden * mx.arange(1, 1 + hidden.shape[1])[None, :, None])


def test_a_model_without_a_separate_backbone_is_called_as_a_whole() -> None:
    model = Mixing()
    assert find_backbone(model, lambda each: each(IDS)) is None
    assert mx.array_equal(narrow_output(model, None, last_token)(IDS), model(IDS)[:, -1:])
