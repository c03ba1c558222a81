"""The fallback for vision models without a plugin of their own."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from greedy import features_of, greedy, start
from mlx_provider import BadRequest, LoadOptions, MediaError, MediaItem, PrefillChunk
from mlx_provider.engine.inputs import FeatureCache
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request
from mlx_provider.families.vision.model import Piece, VisionFeatures, embeddings, head
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from mlx_provider.upstream.mlx_vlm import embed, select_arguments
from mlx_provider_vision import matches
from mlx_provider_vision.loading import load_any
from noted_calls import note_calls
from tiny.models import tiny_image, tiny_video
from tolerances import logprob_tolerance

from .test_vision_parity import COUNT, REQUESTS, check_replay, oracle

SEPARATE = ["qwen2_vl", "qwen2_5_vl", "qwen3_5"]
"""Models whose images are embedded one by one."""
TOGETHER = ["qwen3_vl", "gemma3"]
MODELS = [*SEPARATE, *TOGETHER]


@pytest.fixture(scope="module")
def load_generic(folders: Any) -> Any:
    @cache
    def load(name: str) -> Any:
        return load_any(folders(name), LoadOptions())

    return load


def test_the_generic_family_matches_only_vision_models_of_mlx_vlm(folders) -> None:
    for name in MODELS:
        assert matches(json.loads((folders(name) / "config.json").read_text())) == 2
    assert matches({"model_type": "llava", "vision_config": {}}) == 0
    assert matches({"model_type": "llava", "vision_config": {"hidden_size": 8}}) == 2
    assert matches({"model_type": "llama"}) == 0
    assert matches({"model_type": "no_such_model", "vision_config": {"a": 1}}) == 0
    assert matches({"vision_config": {"a": 1}}) == 0


@pytest.mark.parametrize(
    "request_name",
    [
        *("long text", "two images", "same image twice"),
        *(pytest.param(n, marks=pytest.mark.sweep) for n in ("text", "image", "wide image")),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_a_row_equals_mlx_vlm(name: str, request_name: str, load_generic, ask, folders) -> None:
    parts = REQUESTS[request_name]
    prompt = ask(load_generic(name), *parts)
    media = [part for part in parts if isinstance(part, MediaItem)]
    expected = oracle(folders(name), prompt, media, COUNT)
    assert greedy(load_generic(name), prompt, COUNT) == expected
    assert greedy(load_generic(name), prompt, COUNT, chunk=7) == expected


@pytest.mark.parametrize("name", SEPARATE)
def test_hidden_states_belong_to_the_logits(name: str, load_generic, ask) -> None:
    model = load_generic(name)
    prompt = ask(model, tiny_image(1, 64, 160), "and")
    features, language = features_of(model, prompt), model.model.language_model
    one, other = (
        PrefillChunk(prompt, 0, len(prompt.tokens), model.make_cache(), features) for _ in range(2)
    )
    logits, hidden = model.prefill_hidden(one, 3)
    assert mx.array_equal(logits, model.prefill(other))
    assert mx.allclose(head(language, hidden[None])[0, -1], logits, atol=logprob_tolerance())
    tokens, at = mx.array([7]), mx.array([len(prompt.tokens) + prompt.rope_delta])
    logits, hidden = model.decode_hidden(tokens, one.cache, at)
    assert mx.array_equal(logits, model.decode(tokens, other.cache, at))
    assert mx.allclose(head(language, hidden[:, None])[:, -1], logits, atol=logprob_tolerance())


@pytest.mark.parametrize("name", SEPARATE)
def test_positions_after_an_image_equal_upstreams(name: str, load_generic, ask) -> None:
    model = load_generic(name)
    prompt = ask(model, tiny_image(1, 64, 160), "and", tiny_image(2, 200, 96))
    grids = mx.array([span.inputs.grid for span in prompt.spans])
    positions, delta = model.model.language_model.get_rope_index(
        mx.array([prompt.tokens]), grids, None, None
    )
    assert np.array_equal(np.array(positions)[:, 0], prompt.positions)
    assert int(delta.item()) == prompt.rope_delta != 0


@pytest.mark.parametrize("name", MODELS)
def test_alternating_rows_get_the_tokens_of_each_alone(name: str, load_generic, ask) -> None:
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


@pytest.mark.parametrize("name", TOGETHER)
def test_features_that_depend_on_the_prompt_are_not_shared(name: str, load_generic, ask) -> None:
    model = load_generic(name)
    told = "; ".join(model.info.notes)
    assert "\\u escapes" in told
    assert "prefilled anew at every turn" in told
    one, other = (ask(model, tiny_image(1), text) for text in ("this?", "that?"))
    assert one.spans[0].content_hash != other.spans[0].content_hash
    assert model.embed(one.spans[0]).nbytes > len(one.tokens) * 64 * 4


def test_a_prompt_with_an_image_has_a_snapshot_after_the_system_part(load_generic, ask) -> None:
    model = load_generic("qwen3_vl")
    prompt = ask(model, tiny_image(1), "this?", system="You see.")
    assert [end <= prompt.spans[0].start for end in prompt.snapshot_points] == [True]


@pytest.mark.parametrize("name", SEPARATE)
def test_an_image_is_reused_from_turn_to_turn(name: str, load_generic, monkeypatch) -> None:
    """A chat that grows by an image and a text: all before is in the prefix cache, as alone."""
    model = load_generic(name)
    seen = note_calls(monkeypatch, type(model), "embed", lambda _, span: span.content_hash)
    engine = new_engine(
        model,
        prefix_cache=PrefixCache(budget=lambda: 2**24),
        features=FeatureCache(2**20),
        max_chunk=64,
    )
    turns: list[dict[str, Any]] = []
    media: list[MediaItem] = []
    done: list[Request] = []
    before = 0
    for image in (tiny_image(1), tiny_image(3, 128, 96), None, tiny_image(1)):
        text = {"type": "text", "text": "What is this, and what is it like to be beside it? " * 3}
        media += [] if image is None else [image]
        parts = [text] if image is None else [{"type": "image"}, text]
        turns += [{"role": "user", "content": parts}]
        prompt = model.prepare(turns, tools=[], media=media, variables={})
        request = new_request(prompt, max_tokens=4)
        run(engine, request)
        assert request.cached_tokens >= before
        done.append(request)
        before = prompt.snapshot_points[-1] - 1
        assert before > len(prompt.tokens) - 16
        turns += [{"role": "assistant", "content": "A circle."}]
    assert len(seen) == 2, "the vision tower saw each image once"
    for request in done:
        assert output_of(request).tokens == greedy(model, request.prompt, 4)


def test_an_image_seen_before_is_not_processed_again(load_generic, ask, monkeypatch) -> None:
    model = load_generic("qwen2_vl")
    worked = note_calls(monkeypatch, type(model), "process", lambda _, text, media: text)
    first = ask(model, tiny_image(77), "this?")
    again = ask(model, "what is", tiny_image(77))
    assert len(worked) == 1
    assert again.spans[0].content_hash == first.spans[0].content_hash
    assert mx.array_equal(model.embed(again.spans[0]).rows, model.embed(first.spans[0]).rows)
    assert len(worked) == 2, "of the second prompt, once its features are wanted"


def test_a_model_whose_image_features_depend_on_other_images_is_detected(
    folders, ask, monkeypatch
) -> None:
    from mlx_vlm.models.qwen2_vl.vision import VisionModel

    original = VisionModel.__call__

    def mixed(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows = original(self, *args, **kwargs)
        return rows + 0.1 * rows.mean(axis=0)

    monkeypatch.setattr(VisionModel, "__call__", mixed)
    model = load_any(folders("qwen2_vl"), LoadOptions())
    *_, note = model.info.notes
    assert "depend on what stands beside it" in note
    prompt = ask(model, tiny_image(1), "and", tiny_image(2))
    assert len(prompt.spans) == 1


@pytest.mark.parametrize("name", MODELS)
def test_image_features_can_be_used_twice_for_one_prompt(name: str, load_generic, ask) -> None:
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


def test_image_tokens_go_into_the_text_of_a_string_template(folders, ask, tmp_path: Path) -> None:
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


def test_required_arguments_of_a_model_are_filled_with_none() -> None:
    filled = select_arguments(Demanding(), {"rope_deltas": 1, "mask": 2})
    assert filled == {"pixel_values": None, "mask": 2}
    assert select_arguments(Demanding(), {"pixel_values": np.ones(1)})["pixel_values"] is not None


def test_a_chunk_inside_an_image_has_the_dtype_of_text() -> None:
    image = Piece(0, 4, VisionFeatures(mx.zeros((4, 2))))
    assert embeddings(None, [image], lambda ids: ids.astype(mx.bfloat16)).dtype == mx.bfloat16


def test_an_embedding_that_fails_leaves_no_positions_behind() -> None:
    language = SimpleNamespace()
    fail = lambda *_, **__: setattr(language, "_rope_deltas", 1) or 1 / 0  # noqa: E731
    model = SimpleNamespace(language_model=language, get_input_embeddings=fail)
    with pytest.raises(ZeroDivisionError):
        embed(model, {"input_ids": mx.array([1])})
    assert language._rope_deltas is None


@pytest.mark.parametrize("name", MODELS)
def test_a_preempted_reply_is_prefilled_again(name: str, load_generic, ask) -> None:
    check_replay(load_generic(name), ask)
