"""The pictures the demo model learns to name: one coloured shape on a plain ground."""

import base64
import io
import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (215, 30, 35),
    "green": (30, 150, 50),
    "blue": (30, 70, 215),
    "yellow": (245, 220, 40),
    "orange": (250, 140, 20),
    "purple": (130, 40, 160),
    "pink": (250, 135, 185),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle", "star")
GROUNDS = (
    *[(255, 255, 255)] * 4,
    (235, 235, 235),
    (250, 245, 225),
    (225, 238, 250),
    (200, 200, 200),
)
# The sizes the image processor resizes pictures to, 96 x 96 for any larger square: 4 to 9 tokens.
SIZES = (*[(96, 96)] * 8, *[(64, 64)] * 2, *[(64, 96)] * 2, *[(96, 64)] * 2)


@dataclass(frozen=True)
class Picture:
    """A picture by what is on it; the same fields always draw the same pixels."""

    colour: str
    shape: str
    size: tuple[int, int]
    seed: int

    @property
    def phrase(self) -> str:
        """'a red circle', 'an orange star'."""
        article = "an" if self.colour[0] in "aeiou" else "a"
        return f"{article} {self.colour} {self.shape}"


def _outline(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    if shape == "triangle":
        low = y + radius * 0.8
        return [(x, y - radius), (x + radius, low), (x - radius, low)]
    points = []
    for i in range(10):
        angle, reach = -math.pi / 2 + i * math.pi / 5, radius * (0.45 if i % 2 else 1.08)
        points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    return points


def draw(picture: Picture) -> Image.Image:
    """Draw one picture, its place, size, tint and ground taken from its seed."""
    r = random.Random(f"{picture.colour}{picture.shape}{picture.size}{picture.seed}")
    scale = r.choice([1, 2, 4])  # drawn larger and shrunk, as real pictures arrive
    width, height = (side * scale for side in picture.size)
    image = Image.new("RGB", (width, height), r.choice(GROUNDS))
    pen = ImageDraw.Draw(image)
    radius = min(width, height) * r.uniform(0.25, 0.46)
    stray = 0 if r.random() < 0.3 else 0.9  # people often draw right in the middle
    x = width * 0.5 + r.uniform(-stray, stray) * (width * 0.5 - radius)
    y = height * 0.5 + r.uniform(-stray, stray) * (height * 0.5 - radius)
    fill = tuple(max(0, min(255, v + r.randint(-14, 14))) for v in COLOURS[picture.colour])
    if picture.shape == "circle":
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=fill)
    elif picture.shape == "square":
        half = radius * 0.88
        pen.rectangle([x - half, y - half, x + half, y + half], fill=fill)
    else:
        pen.polygon(_outline(picture.shape, x, y, radius), fill=fill)
    return image.resize(picture.size, Image.BICUBIC) if scale > 1 else image


def png_data_url(picture: Picture) -> str:
    """The picture as the PNG data URL an OpenAI-compatible request carries."""
    buffer = io.BytesIO()
    draw(picture).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def patches(picture: Picture, patch: int = 16, merge: int = 2) -> tuple[np.ndarray, tuple]:
    """(pixel values, (time, rows, columns)) as the Qwen3-VL image processor lays them out.

    Only for pictures of the sizes above, which the processor leaves unresized.
    """
    x = (np.asarray(draw(picture), np.float32) / 255 - 0.5) / 0.5
    rows, cols = x.shape[0] // patch, x.shape[1] // patch
    x = x.transpose(2, 0, 1)
    x = x.reshape(3, rows // merge, merge, patch, cols // merge, merge, patch)
    x = x.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * cols, 3, 1, patch, patch)
    # a still picture fills both frames of the temporal patch
    return np.repeat(x, 2, axis=2).reshape(rows * cols, -1), (1, rows, cols)
