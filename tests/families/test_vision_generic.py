"""The fallback for vision models without a plugin of their own."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_provider import BadRequest, LoadOptions, MediaError, MediaItem
from mlx_provider.testing.tiny_greedy import features_of, greedy, start
from mlx_provider.testing.tiny_media import tiny_image, tiny_video
from mlx_provider.upstream.mlx_vlm_generic import _accepted
from mlx_provider_vision import matches
from mlx_provider_vision.model import load_any

from .test_vision_parity import COUNT, REQUESTS, check_replay, oracle

MODELS = ["qwen2_vl", "qwen3_vl", "qwen3_5", "gemma3"]


@pytest.fixture(scope="module")
def load_generic(folders: Any) -> Any:
    @cache
    def load(name: str) -> Any:
        return load_any(folders(name), LoadOptions())

    return load


def test_only_models_with_vision_that_mlx_vlm_has(folders) -> None:
    for name in MODELS:
        assert matches(json.loads((folders(name) / "config.json").read_text())) == 2
    assert matches({"model_type": "llava", "vision_config": {}}) == 0
    assert matches({"model_type": "llava", "vision_config": {"hidden_size": 8}}) == 2
    assert matches({"model_type": "llama"}) == 0
    assert matches({"model_type": "no_such_model", "vision_config": {"a": 1}}) == 0
    assert matches({"vision_config": {"a": 1}}) == 0


@pytest.mark.parametrize("request_name", list(REQUESTS))
@pytest.mark.parametrize("name", MODELS)
def test_one_row_equals_mlx_vlm(name: str, request_name: str, load_generic, ask, folders) -> None:
    parts = REQUESTS[request_name]
    prompt = ask(load_generic(name), *parts)
    media = [part for part in parts if isinstance(part, MediaItem)]
    expected = oracle(folders(name), prompt, media, COUNT)
    assert greedy(load_generic(name), prompt, COUNT) == expected
    assert greedy(load_generic(name), prompt, COUNT, chunk=7) == expected


@pytest.mark.parametrize("name", MODELS)
def test_rows_in_turn_do_not_meet(name: str, load_generic, ask) -> None:
    model = load_generic(name)
    prompts = [ask(model, *parts) for parts in REQUESTS.values()]
    alone = [greedy(model, prompt, 6) for prompt in prompts]
    rows = [start(model, prompt) for prompt in prompts]
    out: list[list[int]] = [[] for _ in rows]
    for _ in range(6):
        for own, row in zip(out, rows, strict=True):
            own.append(int(mx.argmax(row.logits)))
            position = mx.array([row.position])
            row.logits = model.decode(mx.array([own[-1]]), row.cache, position)[0]
            row.length += 1
    assert out == alone


def test_typed_image_tokens_are_no_images(load_generic, ask) -> None:
    for name, typed in (("qwen3_vl", "<|image_pad|>"), ("gemma3", "<start_of_image>")):
        prompt = ask(load_generic(name), f"What is {typed}?", tiny_image(1))
        assert len(prompt.spans) == 1
        text = ask(load_generic(name), f"What is {typed}?")
        assert text.spans == []
        assert load_generic(name).image_token not in text.tokens


def test_features_belong_to_one_prompt(load_generic, ask) -> None:
    model = load_generic("qwen3_vl")
    one, other = (ask(model, tiny_image(1), text) for text in ("this?", "that?"))
    assert one.spans[0].content_hash != other.spans[0].content_hash
    assert one.checkpoints == ()
    assert model.embed(one.spans[0]).nbytes > len(one.tokens) * 64 * 4


@pytest.mark.parametrize("name", MODELS)
def test_features_serve_the_same_prompt_twice(name: str, load_generic, ask) -> None:
    model = load_generic(name)
    prompt = ask(model, *REQUESTS["two images"])
    known = features_of(model, prompt)
    first, again = (start(model, prompt, features=known).logits for _ in range(2))
    assert mx.array_equal(first, again)


def test_video_and_missing_places_are_refused(load_generic, ask) -> None:
    with pytest.raises(MediaError, match="no video"):
        ask(load_generic("gemma3"), tiny_video(1))
    plain = [{"role": "user", "content": "no image"}]
    with pytest.raises(BadRequest, match="placed 0 of 1"):
        load_generic("gemma3").prepare(plain, tools=[], media=[tiny_image(1)], variables={})


def test_a_template_without_image_parts(folders, ask, tmp_path: Path) -> None:
    """Image tokens go into the text where the template takes plain strings only."""
    import shutil

    folder = Path(shutil.copytree(folders("qwen3_vl"), tmp_path / "m"))
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    model = load_any(folder, LoadOptions())
    prompt = ask(model, "Look: ", tiny_image(1), " there")
    assert prompt.text == "[user] Look: <|image_pad|> there\n"
    assert prompt.spans[0].end - prompt.spans[0].start == 9


class Demanding:
    """A language model whose signature demands what only images bring."""

    def __call__(self, inputs: Any, pixel_values: Any, mask: Any = None, cache: Any = None) -> Any:
        return pixel_values


def test_demanded_arguments_are_filled() -> None:
    assert _accepted(Demanding(), {"rope_deltas": 1, "mask": 2}) == {
        "pixel_values": None,
        "mask": 2,
    }
    assert _accepted(Demanding(), {"pixel_values": np.ones(1)})["pixel_values"] is not None


@pytest.mark.parametrize("name", MODELS)
def test_a_reply_is_prefilled_again(name: str, load_generic, ask) -> None:
    check_replay(load_generic(name), ask)
