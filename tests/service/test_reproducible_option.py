"""The operator's option `reproducible`: a separate model, and its notes."""

import logging
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.litellm.model_info import engine_options, operator_options
from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.serving.measurements import decoding
from mlx_provider.serving.probe import NO_ROOM
from mlx_provider.serving.reproducible import ROWS_ALONE

SAME = ModelOptions(reproducible=True)
LONG = "The same long beginning of a question. " * 30


def test_the_config_entry_has_the_option() -> None:
    chosen = operator_options({"model_info": {"mlx": {"reproducible": True}}})
    assert engine_options(chosen) == SAME


def test_prefixes_are_not_shared_with_the_usual_engine(
    own_model: Any, build_tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = own_model(build_tiny("qwen3"), max_chunk=64)
    with caplog.at_level(logging.INFO):
        plain = model.ask(LONG, max_tokens=3)
        first = model.ask(LONG, max_tokens=3, options=SAME)
        again = model.ask(LONG, max_tokens=3, options=SAME)
    assert (plain.usage.cached_tokens, first.usage.cached_tokens) == (0, 0)
    assert again.usage.cached_tokens == (again.usage.prompt_tokens - 1) // 64 * 64 > 0
    assert {each.key.kind for each in model.service.models.queue.models()} == {"", "reproducible"}
    status = next(s for s in model.client.health().models if s.reproducible)
    assert (status.kv_layout, status.mixed_prefill) == ("fixed", False)
    fixed = status.reproducible
    assert (fixed.rows, fixed.tokens) == (8, 64)
    told = "reproducible: rows decode 8 to a pass, filled up, prompts run in passes of 64 tokens"
    assert decoding(status) == told
    assert f"{model.model}: {decoding(status)}" in caplog.messages


def test_prefixes_on_disk_are_those_of_this_software(
    own_model: Any, build_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version can round differently; prefixes of the other engine are not used either."""
    folder, settings = build_tiny("qwen3"), {"max_chunk": 64, "kv_layout": "solo"}
    cached = []
    for options, version in ((ModelOptions(), "1"), (SAME, "1"), (SAME, "1"), (SAME, "2")):
        installed = {"mlx": version}.get
        monkeypatch.setattr("mlx_provider.serving.measurements.installed_version", installed)
        model = own_model(folder, disk_cache=tmp_path / "disk", **settings)
        answer = model.ask(LONG, max_tokens=3, options=options)
        cached.append(answer.usage.cached_tokens)
        model.service.close()
    assert cached[0] == cached[1] == cached[3] == 0
    assert cached[2] > 0


@pytest.mark.parametrize("settings", [{"max_rows": 1}, {"kv_layout": "solo"}])
def test_rows_that_cannot_share_a_pass_have_one_each(
    own_model: Any, build_tiny: Any, settings: dict[str, Any]
) -> None:
    model = own_model(build_tiny("qwen3"), **settings)
    model.ask(max_tokens=2, options=SAME)
    (status,) = model.client.health().models
    told = (
        "reproducible: each row decodes in a pass of its own, prompts run in passes of 256 tokens"
    )
    assert decoding(status) == told
    assert ["sampling" in note for note in status.notes] == [True]


def test_a_note_reports_missing_memory_for_the_trial(
    own_model: Any, build_tiny: Any, tmp_path: Path
) -> None:
    """The measurements of the model are known, so only this trial needs the memory."""
    folder, known = build_tiny("qwen3"), str(tmp_path / "measurements.json")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    rows = []
    for limit in (100 * size, size + 2_000_000):
        model = own_model(folder, measurements=known, memory_limit=limit, max_chunk=16)
        model.ask(max_tokens=2, options=SAME)
        (status,) = model.client.health().models
        rows.append(status.reproducible.rows)
        model.service.close()
    assert rows == [8, 1]
    assert status.notes[1:] == [f"{ROWS_ALONE}: {NO_ROOM}"]
