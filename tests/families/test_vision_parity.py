"""Every vision family against mlx-vlm's own generation of one request at a time."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from greedy import Started, continue_greedily, features_of, greedy, start
from mlx_provider import LoadedModel, MediaItem, Prompt
from mlx_provider.engine.execution.grouped_kv import join
from mlx_provider.upstream.batch_caches import merge_rows, rows_of
from tiny.models import tiny_image

QWEN = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
ALL = [*QWEN, "gemma3"]
LONG = "Which colour is the circle, and what is the weather like in Paris today? " * 2
COUNT = 12

REQUESTS: dict[str, tuple[str | MediaItem, ...]] = {
    "text": ("Hello there, how are you?",),
    "long text": (LONG,),
    "image": ("What is this?", tiny_image(1)),
    "wide image": (tiny_image(2, 64, 160), "Describe"),
    "two images": ("Compare ", tiny_image(1), " with ", tiny_image(3, 128, 96), " please"),
    "same image twice": (tiny_image(4), LONG[:60], tiny_image(4)),
}


@cache
def _upstreams(folder: Path) -> tuple[Any, Any]:
    import mlx_vlm

    return mlx_vlm.load(str(folder))  # type: ignore[return-value]


def oracle(folder: Path, prompt: Prompt, media: list[MediaItem], count: int) -> list[int]:
    """Greedy tokens by mlx-vlm alone; also checks that it sees the same prompt tokens."""
    from mlx_vlm.generate.dispatch import stream_generate
    from mlx_vlm.utils import prepare_inputs

    model, processor = _upstreams(folder)
    images = [Image.fromarray(item.pixels) for item in media]
    inputs: dict[str, Any] = prepare_inputs(
        processor,
        images=images or None,
        prompts=prompt.text,
        add_special_tokens=False,
        image_token_index=getattr(model.config, "image_token_index", None),
    )
    assert inputs["input_ids"][0].tolist() == list(prompt.tokens)
    extra = {k: v for k, v in inputs.items() if k == "image_grid_thw"}
    replies = stream_generate(
        model,
        processor,
        prompt.text,
        max_tokens=count,
        temperature=0.0,
        input_ids=inputs["input_ids"],
        pixel_values=inputs.get("pixel_values"),
        mask=inputs["attention_mask"],
        **extra,
    )
    return [reply.token for reply in replies if reply.token is not None][:count]


EACH = [
    pytest.param(name, marks=pytest.mark.sweep) if name.endswith("_moe") else name for name in ALL
]
"""Experts see one token at a time, so the sweep has them where rows and chunks are tried."""


@pytest.fixture(scope="module")
def alone(load, ask) -> Callable[[str], dict[str, list[int]]]:
    """What each of the requests gets alone, by the name of a model."""

    @cache
    def answers(name: str) -> dict[str, list[int]]:
        model = load(name)
        return {key: greedy(model, ask(model, *parts), COUNT) for key, parts in REQUESTS.items()}

    return answers


def cases() -> list[Any]:
    found = [(name, request) for name in QWEN for request in REQUESTS]
    found += [("gemma3", request) for request in REQUESTS if "text" in request]
    return found


@pytest.mark.parametrize(("name", "request_name"), cases())
def test_one_row_equals_mlx_vlm(name: str, request_name: str, load, ask, folders, alone) -> None:
    parts = REQUESTS[request_name]
    prompt = ask(load(name), *parts)
    media = [part for part in parts if isinstance(part, MediaItem)]
    assert alone(name)[request_name] == oracle(folders(name), prompt, media, COUNT)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize(
    "chunk", [1, 7, *(pytest.param(n, marks=pytest.mark.sweep) for n in (3, 16))]
)
def test_chunks_of_any_size_give_equal_tokens(name: str, chunk: int, load, ask, alone) -> None:
    prompt = ask(load(name), *REQUESTS["two images"])
    assert greedy(load(name), prompt, COUNT, chunk=chunk) == alone(name)["two images"]


def started(model: LoadedModel, ask: Any) -> list[Started]:
    return [start(model, ask(model, *parts)) for parts in REQUESTS.values()]


@pytest.mark.parametrize("name", EACH)
def test_rows_of_any_kind_decode_together(name: str, load, ask, alone) -> None:
    model = load(name)
    rows = started(model, ask)
    cache = merge_rows([row.cache for row in rows])
    assert continue_greedily(model, rows, cache, COUNT) == [*alone(name).values()]


@pytest.mark.parametrize("name", EACH)
def test_groups_of_rows_decode_in_one_pass_as_alone(name: str, load, ask, alone) -> None:
    model = load(name)
    rows = started(model, ask)
    pair = merge_rows([row.cache for row in rows[:2]])
    caches, sizes = [pair, *(row.cache for row in rows[2:])], [2, *[1] * (len(rows) - 2)]
    cache = join(caches, sizes)
    assert continue_greedily(model, rows, cache, COUNT) == [*alone(name).values()]


@pytest.mark.parametrize("name", EACH)
def test_rows_that_join_and_leave_get_the_tokens_of_each_alone(name: str, load, ask) -> None:
    model = load(name)
    first, second = ask(model, *REQUESTS["two images"]), ask(model, *REQUESTS["wide image"])
    alone = [greedy(model, first, 15), greedy(model, second, 9)]
    early = start(model, first)
    out = continue_greedily(model, [early], early.cache, 5)[0]
    late = start(model, second)
    cache = merge_rows([early.cache, late.cache])
    both = continue_greedily(model, [early, late], cache, 5)
    apart = rows_of(cache, range(2))
    out += both[0] + continue_greedily(model, [early], apart[0], 5)[0]
    assert [out, both[1] + continue_greedily(model, [late], apart[1], 4)[0]] == alone


@pytest.mark.parametrize("name", EACH)
def test_features_of_an_image_can_be_reused_in_another_prompt(name: str, load, ask) -> None:
    model = load(name)
    here = ask(model, *REQUESTS["two images"])
    there = ask(model, tiny_image(3, 128, 96), "then", tiny_image(1))
    known = features_of(model, here)
    assert {span.content_hash for span in there.spans} == set(known)
    fresh = start(model, there).logits
    reused = start(model, there, features=known).logits
    assert mx.array_equal(fresh, reused)


@pytest.mark.parametrize("name", EACH)
def test_another_image_gives_another_answer(name: str, load, ask) -> None:
    model = load(name)
    one, other = (start(model, ask(model, "This:", tiny_image(i))).logits for i in (1, 2))
    assert float(mx.abs(one - other).max()) > 0.01


@pytest.mark.parametrize("name", ALL)
def test_a_request_leaves_no_positions_on_the_model(name: str, load, ask) -> None:
    model = load(name)
    text = ask(model, *REQUESTS["text"])
    before = np.array(start(model, text).logits)
    greedy(model, ask(model, *REQUESTS["two images"]), 3)
    assert np.array_equal(np.array(start(model, text).logits), before)
    for left in ("_rope_deltas", "_position_ids"):
        assert getattr(model.model.language_model, left, None) is None


@pytest.mark.parametrize("name", EACH)
def test_a_preempted_reply_of_a_vision_family_is_prefilled_again(name: str, load, ask) -> None:
    check_replay(load(name), ask)


def check_replay(model: LoadedModel, ask: Any) -> None:
    """A row that starts again from its committed tokens goes on as if nothing had been."""
    prompt = ask(model, *REQUESTS["two images"])
    whole = greedy(model, prompt, 12)
    row = start(model, prompt.followed_by(whole[:5]), chunk=len(prompt.tokens) + 4)
    assert continue_greedily(model, [row], row.cache, 7)[0] == whole[5:]
