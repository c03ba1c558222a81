"""Messages and media to tokens, spans, positions and snapshot points."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from greedy import features_of, greedy
from mlx_provider import BadRequest, MediaError, MediaItem
from mlx_provider_qwen3_vl import patches
from tiny.models import tiny_image, tiny_video
from tolerances import logprob_tolerance

QWEN = ["qwen3_vl", "qwen3_5"]
ALL = [*QWEN, "gemma3"]
TYPED = {
    "qwen3_vl": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"],
    "qwen3_5": ["<|image_pad|>"],
    "gemma3": ["<start_of_image>", "<image_soft_token>"],
}


@pytest.mark.parametrize("name", QWEN)
@pytest.mark.parametrize(
    "parts",
    [
        ("What is this?", tiny_image(1)),
        (tiny_image(1, 64, 160), "and", tiny_image(2, 200, 96), tiny_image(1)),
        ("Before ", tiny_video(1), " after ", tiny_image(2, 32, 224)),
    ],
    ids=["image", "three images", "video and image"],
)
def test_rotary_positions_equal_upstreams(name: str, parts: Any, load, ask) -> None:
    model = load(name)
    prompt = ask(model, *parts)
    grids: dict[str, list[Any]] = {"image": [], "video": []}
    for item in (part for part in parts if isinstance(part, MediaItem)):
        blocks = model.media_format.expand(item).blocks
        t, h, w = len(blocks), *blocks[0].inputs.grid[1:]
        grids[item.kind].append((t, h, w))
    positions, delta = model.model.language_model.get_rope_index(
        mx.array([prompt.tokens]),
        mx.array(grids["image"]) if grids["image"] else None,
        mx.array(grids["video"]) if grids["video"] else None,
        None,
    )
    assert np.array_equal(np.array(positions)[:, 0], prompt.positions)
    assert int(delta.item()) == prompt.rope_delta


@pytest.mark.parametrize("name", QWEN)
def test_text_alone_needs_no_positions(name: str, load, ask) -> None:
    prompt = ask(load(name), "Hello")
    assert prompt.positions is None
    assert prompt.rope_delta == 0
    assert prompt.spans == []


@pytest.mark.parametrize("name", QWEN)
def test_video_frames_are_processed_as_by_upstream(name: str, load, ask, folders) -> None:
    import mlx_vlm

    model, video = load(name), tiny_video(3, frames=5)
    prompt = ask(model, "What happens?", video)
    _, processor = mlx_vlm.load(str(folders(name)), lazy=True)
    frames = [video.pixels]
    inputs = processor(text=[prompt.text], videos=frames, add_special_tokens=False)
    assert inputs["input_ids"][0].tolist() == list(prompt.tokens)
    tower = model.model.vision_tower
    rows, _ = tower(inputs["pixel_values_videos"], inputs["video_grid_thw"])
    ours = features_of(model, prompt)
    assert len(prompt.spans) == 3
    together = mx.concatenate([ours[span.content_hash].rows for span in prompt.spans])
    np.testing.assert_allclose(np.array(together), np.array(rows), atol=logprob_tolerance())
    assert greedy(model, prompt, 8, chunk=5) == greedy(model, prompt, 8)


@pytest.mark.parametrize("name", ALL)
def test_typed_media_tokens_stay_text(name: str, load, ask) -> None:
    model = load(name)
    for typed in TYPED[name]:
        question = f"What does {typed} mean?"
        alone = ask(model, question)
        assert alone.spans == []
        assert not set(alone.tokens) & model.media_format.tokens
        assert typed in alone.text
        assert typed in model.tokenizer.decode(alone.tokens)
        mixed = ask(model, question, tiny_image(1), typed)
        assert len(mixed.spans) == 1
        inside = mixed.tokens[mixed.spans[0].start : mixed.spans[0].end]
        assert len(set(inside)) == 1
        outside = [*mixed.tokens[: mixed.spans[0].start], *mixed.tokens[mixed.spans[0].end :]]
        assert not set(outside) & model.media_format.tokens


def test_typed_media_tokens_in_tools_and_calls_stay_text(load) -> None:
    model = load("qwen3_vl")
    call = {"function": {"name": "look", "arguments": {"at": "<|image_pad|>"}}}
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "saw <|image_pad|>"},
    ]
    tool = {"type": "function", "function": {"name": "look", "description": "<|video_pad|>"}}
    prompt = model.prepare(messages, tools=[tool], media=[], variables={})
    assert prompt.spans == []
    assert not set(prompt.tokens) & model.media_format.tokens
    assert messages[2]["content"] == "saw <|image_pad|>"


def test_an_image_in_a_tool_result_gets_its_image_tokens(load) -> None:
    model = load("qwen3_vl")
    messages = [
        {"role": "user", "content": "Take a screenshot"},
        {"role": "tool", "content": [{"type": "text", "text": "Done"}, {"type": "image"}]},
    ]
    prompt = model.prepare(messages, tools=[], media=[tiny_image(5)], variables={})
    assert [span.end - span.start for span in prompt.spans] == [9]


def test_every_prompt_begins_with_exactly_one_bos(load, ask) -> None:
    model = load("gemma3")
    bos = model.tokenizer.fast.token_to_id("<bos>")
    for prompt in (ask(model, "Hello"), ask(model, "Hello", tiny_image(1))):
        assert list(prompt.tokens).count(bos) == 1
        assert prompt.tokens[0] == bos
    assert model.tokenizer.encode("Hello", special=True)[0] == bos


@pytest.mark.parametrize("name", ALL)
def test_checkpoints_follow_the_first_two_messages_and_the_last(name: str, load) -> None:
    model = load(name)
    first = [{"role": "user", "content": "Hello there"}]
    more = [*first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "How?"}]
    system = [{"role": "system", "content": "Be brief"}, *more]
    prompts = [model.prepare(m, tools=[], media=[], variables={}) for m in (first, more, system)]
    # Gemma's template writes the system part into the user's message
    folded = name == "gemma3"
    assert [len(prompt.snapshot_points) for prompt in prompts] == [1, 3, 3 + folded]
    at = prompts[0].snapshot_points[0]
    assert list(prompts[1].tokens[:at]) == list(prompts[0].tokens[:at])
    for prompt in prompts:
        ends = prompt.snapshot_points[folded and prompt is prompts[2] :]
        assert all(prompt.tokens[i - 1] in model.info.stop_tokens for i in ends)
        assert not set(prompt.tokens[prompt.snapshot_points[-1] :]) & model.info.stop_tokens


def test_the_system_prompt_and_the_whole_history_arrive(load, ask) -> None:
    for name in ALL:
        prompt = ask(load(name), "What?", tiny_image(1), system="Answer in Latin")
        assert "Answer in Latin" in prompt.text
        assert "Answer in Latin" in load(name).tokenizer.decode(prompt.tokens)


def test_template_variables_reach_the_template(load) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    variables = {"enable_thinking": False}
    prompt = load("qwen3_5").prepare(messages, tools=[], media=[], variables=variables)
    assert "<think>" in prompt.text


@pytest.mark.parametrize("name", ALL)
def test_media_that_the_template_does_not_place_are_refused(name: str, load) -> None:
    messages = [{"role": "user", "content": "no image here"}]
    with pytest.raises(BadRequest, match="placed 0 of 1"):
        load(name).prepare(messages, tools=[], media=[tiny_image(1)], variables={})


def test_an_error_raised_by_the_template_is_a_bad_request(load) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(BadRequest, match="roles must alternate"):
        load("gemma3").prepare(turns, tools=[], media=[], variables={})


def test_the_template_decides_whether_late_system_messages_are_hoisted(load) -> None:
    assert load("gemma3").info.hoist_system
    assert not load("qwen3_vl").info.hoist_system


def test_extreme_aspect_ratios_and_unsupported_videos_are_refused(load, ask) -> None:
    with pytest.raises(MediaError, match="aspect ratio"):
        ask(load("qwen3_vl"), tiny_image(1, 1, 300))
    with pytest.raises(MediaError, match="video"):
        load("gemma3").media_format.expand(tiny_video(1))


def test_an_image_of_one_pixel_is_placed_and_generates(load, ask) -> None:
    for name in ALL:
        prompt = ask(load(name), tiny_image(1, 1, 1))
        assert len(prompt.spans) == 1
        assert len(greedy(load(name), prompt, 2)) == 2


def test_low_detail_and_max_pixels_limit_the_image_tokens(load) -> None:
    model = load("qwen3_vl")
    big = model.media_format.expand(tiny_image(1, 1000, 1500)).blocks[0]
    _, h, w = big.inputs.grid
    assert h * w * 16 * 16 <= model.info.max_pixels == 65536
    large = tiny_image(1, 1024, 1024)
    low = replace(large, detail="low")
    limits = model.media_format.expand.__self__.images
    limits.max_pixels = 1024 * 1024
    try:
        sizes = [model.media_format.expand(item).blocks[0] for item in (large, low)]
    finally:
        limits.max_pixels = 65536
    assert sizes[0].count == 4 * sizes[1].count
    assert sizes[0].content_hash != sizes[1].content_hash


@pytest.mark.parametrize("name", ALL)
def test_prompts_are_prepared_on_many_threads(name: str, load, ask) -> None:
    model, image = load(name), tiny_image(1)

    def tokens(i: int) -> list[int]:
        return list(ask(model, f"question {i}", image, "typed <|image_pad|>").tokens)

    expected = [tokens(i) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokens, range(8))) == expected


@pytest.mark.parametrize("size", [(96, 96), (64, 160), (200, 96), (1, 1), (40, 3000), (300, 520)])
def test_patches_computed_in_strips_equal_those_of_upstream(
    size: tuple[int, int], load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "STRIP_PIXELS", 4096)
    model, item = load("qwen3_vl"), tiny_image(7, *size)
    images = model.media_format.expand.__self__.images
    want, grid = images._process_one(item.pixels.transpose(2, 0, 1))
    inputs = model.media_format.expand(item).blocks[0].inputs
    assert list(inputs.grid) == grid
    assert np.array_equal(np.array(inputs.tower_input(mx.float32)), want)


def test_the_scaled_square_images_of_gemma_equal_those_of_upstream(load) -> None:
    model = load("gemma3")
    for size in ((96, 96), (64, 160), (300, 520)):
        item = tiny_image(7, *size)
        inputs = model.media_format.expand(item).blocks[0].inputs
        want = inputs.processor(
            item.pixels, return_tensors="np", input_data_format="channels_last"
        )["pixel_values"]
        assert np.array_equal(inputs.values(), want)


@pytest.mark.parametrize("frames", [1, 4, 5])
def test_video_patches_in_groups_of_frames_equal_those_of_upstream(frames: int, load) -> None:
    model, video = load("qwen3_vl"), tiny_video(3, frames=frames)
    upstream = model.media_format.expand.__self__.videos
    want, _ = upstream._process_one(video.pixels.transpose(0, 3, 1, 2))
    blocks = model.media_format.expand(video).blocks
    made = [np.array(block.inputs.tower_input(mx.float32)) for block in blocks]
    assert np.array_equal(np.concatenate(made), want)
