"""The trained demo model: what it says of pictures, alone and in a full batch."""

import hashlib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

import mlx_provider
from greedy import continue_greedily, greedy, start
from mlx_provider import LoadedModel, LoadOptions, MediaItem, Prompt
from mlx_provider.upstream.batch_caches import merge_rows
from mlx_provider_qwen3_vl import load as load_qwen3_vl

FOLDER = Path(mlx_provider.__file__).parent / "demo" / "model"
COLOURS = {
    "red": (215, 30, 35),
    "green": (30, 150, 50),
    "blue": (30, 70, 215),
    "yellow": (245, 220, 40),
    "purple": (130, 40, 160),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle")
LENGTH = 8


def picture(colour: str, shape: str, size: tuple[int, int] = (96, 96)) -> MediaItem:
    """One shape in the middle of a white ground."""
    width, height = size
    image = Image.new("RGB", size, (255, 255, 255))
    pen = ImageDraw.Draw(image)
    x, y, r = width / 2, height / 2, min(size) * 0.4
    if shape == "circle":
        pen.ellipse([x - r, y - r, x + r, y + r], fill=COLOURS[colour])
    elif shape == "square":
        side = r * 0.88
        pen.rectangle([x - side, y - side, x + side, y + side], fill=COLOURS[colour])
    else:
        low = y + r * 0.8
        pen.polygon([(x, y - r), (x + r, low), (x - r, low)], fill=COLOURS[colour])
    pixels = np.ascontiguousarray(np.asarray(image, np.uint8))
    key = hashlib.sha256(f"{size}".encode() + pixels.tobytes()).hexdigest()
    return MediaItem.of("image", pixels, key)


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_qwen3_vl(FOLDER, LoadOptions())


def question(model: LoadedModel, item: MediaItem, text: str = "What is this?") -> Prompt:
    content: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    return model.prepare(messages, tools=[], media=[item], variables={})


def reply(model: LoadedModel, tokens: list[int]) -> str:
    stop = next((i for i, t in enumerate(tokens) if t in model.info.stop_tokens), len(tokens))
    return model.tokenizer.decode(tokens[:stop])


def test_the_demo_model_names_the_colour_of_every_picture(demo: LoadedModel) -> None:
    for colour, shape in product(COLOURS, SHAPES):
        said = reply(demo, greedy(demo, question(demo, picture(colour, shape)), LENGTH))
        assert colour in said, f"a {colour} {shape} is called {said!r}"


def test_the_demo_model_names_the_shape_of_every_picture(demo: LoadedModel) -> None:
    for colour, shape in product(COLOURS, SHAPES):
        said = reply(demo, greedy(demo, question(demo, picture(colour, shape)), LENGTH))
        assert shape in said, f"a {colour} {shape} is called {said!r}"


def test_the_demo_model_gives_the_same_answers_in_a_full_batch(demo: LoadedModel) -> None:
    sizes = ((96, 96), (64, 64), (128, 64), (64, 96))
    pictures = [
        picture(colour, shape, sizes[i % 4])
        for i, (colour, shape) in enumerate(product(COLOURS, SHAPES))
    ]
    prompts = [question(demo, item) for item in pictures[:8]]
    alone = [greedy(demo, prompt, LENGTH) for prompt in prompts]
    assert len({reply(demo, tokens) for tokens in alone}) > 2
    rows = [start(demo, prompt, chunk=5) for prompt in prompts]
    cache = merge_rows([row.cache for row in rows])
    assert continue_greedily(demo, rows, cache, LENGTH) == alone
