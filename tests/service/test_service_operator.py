"""Options of the operator for images: served as text, and images that a model cannot take."""

from typing import Any

import pytest

from mlx_provider.errors import BadRequest
from mlx_provider.protocol.requests import ModelOptions
from tiny.models import tiny_image_part as image

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def history(in_tool: bool) -> list[dict[str, Any]]:
    """A session with an image in its history."""
    seen = [{"type": "text", "text": "before"}, image(), {"type": "text", "text": "after"}]
    if not in_tool:
        return [{"role": "user", "content": seen}]
    return [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": seen},
    ]


@pytest.mark.parametrize("in_tool", [False, True], ids=["user", "tool"])
def test_an_image_that_a_model_cannot_take_is_left_out(qwen: Any, in_tool: bool) -> None:
    answer = qwen.ask(messages=history(in_tool), max_tokens=4)
    assert answer.only.reason == "length"
    path = f"messages[{2 * in_tool}].content[1]"
    assert answer.warnings == [f"{path}: image omitted, this model cannot take it"]
    prompt = qwen.prompt_of(messages=history(in_tool))
    assert "before\n\n[image omitted: this model cannot take it]\n\nafter" in prompt


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma3", "qwen2_vl"])
def test_a_vision_model_can_be_served_as_text(tiny: Any, family: str) -> None:
    model, as_text = tiny(family), ModelOptions(modality="text")
    plain = model.ask("Hello there", max_tokens=6, logprobs=True).only.tokens
    assert model.ask("Hello there", max_tokens=6, logprobs=True, options=as_text).only.tokens == (
        plain
    )
    for in_tool in (False, True):  # an agent sends its history again: an error would end it
        answer = model.ask(messages=history(in_tool), max_tokens=2, options=as_text)
        assert any("image omitted" in each for each in answer.warnings)
    whole, bare = (model.served(options).status for options in (ModelOptions(), as_text))
    assert (whole.vision, bare.vision) == (True, False)
    assert bare.family == whole.family
    tower = whole.weights_bytes - bare.weights_bytes
    assert tower > 10_000
    assert not model.ask(messages=history(False), max_tokens=2).warnings, "the other one still sees"


def test_the_tower_of_a_model_served_as_text_is_not_in_memory(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    model, evaluated = tiny("qwen3_vl", seed=5), []
    original = mx.eval
    monkeypatch.setattr(
        mx, "eval", lambda *a: evaluated.extend(k for k, _ in tree_flatten(list(a))) or original(*a)
    )
    model.ask("Hello", max_tokens=1, options=ModelOptions(modality="text"))
    assert any("language_model" in name for name in evaluated)
    assert not any("vision_tower" in name for name in evaluated)


@pytest.mark.parametrize(
    ("family", "shape"),
    [("gpt_oss", {"head_dim": 32}), ("deepseek_v3", {}), ("llama", {"head_dim": 24})],
    ids=["sinks", "latent attention", "narrow heads"],
)
def test_kv_bits_that_a_model_cannot_read_are_refused(tiny: Any, family: str, shape: Any) -> None:
    model = tiny(family, **shape)
    with pytest.raises(BadRequest, match=r"^model_info.mlx.kv_bits: .*leave kv_bits out$") as error:
        model.ask(options=ModelOptions(kv_bits=4))
    assert error.value.param == "model_info.mlx.kv_bits"
    assert model.ask(max_tokens=2).only.reason == "length"


def test_settings_of_the_operator_reach_the_scheduler(own_model: Any, qwen: Any) -> None:
    model = own_model(qwen.model, stall_target=0.25, max_chunk=96)
    limits = model.served().engine.scheduler.chunking.limits
    assert (limits.stall_target, limits.max_chunk) == (0.25, 96)


def test_notes_are_in_status_and_log(tiny: Any) -> None:
    from dataclasses import replace

    served = tiny("qwen3").served()
    noted = replace(served.model.info, notes=("images are slow",))
    shown = replace(served, info=noted).status
    assert shown.notes == ["images are slow", *served.weights.instance.probe.notes]
