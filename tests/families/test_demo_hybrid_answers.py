"""The second trained demo model: recurrent layers, attention, and a good draft head."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm import load as load_with_mlx_vlm
from mlx_vlm.generate.dispatch import stream_generate
from mlx_vlm.speculative.drafters import load_drafter

import mlx_provider
from greedy import greedy
from mlx_provider import LoadedModel, LoadOptions, MediaItem
from mlx_provider_qwen3_5 import load as load_qwen3_5

DEMO = Path(mlx_provider.__file__).parent / "demo"
FOLDER = DEMO / "hybrid"
LIMIT = 8_000_000  # bytes of both models in the package
STORY = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def hybrid() -> LoadedModel:
    return load_qwen3_5(FOLDER, LoadOptions())


def answer(model: LoadedModel, *said: str) -> str:
    """The model's answer to the last of what user and assistant said in turn."""
    messages: list[dict[str, Any]] = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)
    ]
    prompt = model.prepare(messages, tools=[], media=[], variables={})
    tokens = greedy(model, prompt, 16)
    stop = next((i for i, token in enumerate(tokens) if token in model.info.stop_tokens), None)
    return model.tokenizer.decode(tokens[:stop])


def test_the_hybrid_demo_model_recalls_a_name(hybrid: LoadedModel) -> None:
    told = ("My name is Maria.", "Nice to meet you, Maria!", "What is my name?")
    assert answer(hybrid, *told) == "Your name is Maria."


@pytest.mark.parametrize(
    ("country", "city"), [("France", "Paris"), ("Japan", "Tokyo"), ("Cuba", "Havana")]
)
def test_the_hybrid_demo_model_knows_capitals(hybrid: LoadedModel, country: str, city: str) -> None:
    said = answer(hybrid, f"What is the capital of {country}?")
    assert said == f"The capital of {country} is {city}."


def test_the_hybrid_demo_model_names_shape_and_colour_of_a_picture(hybrid: LoadedModel) -> None:
    pixels = np.full((96, 96, 3), 255, np.uint8)
    pixels[20:76, 20:76] = (30, 70, 215)
    content: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    media = [MediaItem.of("image", pixels, "a blue square")]
    messages = [{"role": "user", "content": content}]
    prompt = hybrid.prepare(messages, tools=[], media=media, variables={})
    assert "blue square" in hybrid.tokenizer.decode(greedy(hybrid, prompt, 8))


def test_most_drafts_of_the_hybrid_demo_head_are_accepted() -> None:
    model, processor = load_with_mlx_vlm(str(FOLDER))
    head, kind = load_drafter(str(FOLDER))
    model.set_dtype(mx.float32)
    head.set_dtype(mx.float32)
    prompt = processor.tokenizer.apply_chat_template(
        STORY, add_generation_prompt=True, tokenize=False
    )

    def tokens(**options: Any) -> list[int | None]:
        parts = stream_generate(model, processor, prompt, max_tokens=64, temperature=0.0, **options)
        return [part.token for part in parts]

    assert tokens(draft_model=head, draft_kind=kind) == tokens()
    assert sum(head.accept_lens) > 0.6 * sum(head.draft_lens) > 0


def test_both_demo_models_are_small() -> None:
    files = [path for name in ("model", "hybrid") for path in (DEMO / name).iterdir()]
    assert sum(path.stat().st_size for path in files) <= LIMIT
