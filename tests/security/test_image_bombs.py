"""Images that unpack to far more than they are, against a real engine process."""

import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine_process import EngineProcess, engine_process
from tiny_pictures import chunk, encoded, tiff_of_one_tile
from tiny_pictures import image_part as part

MB = 2**20
ROOM = 64 * MB
STRIPS = 16 << 20
"""Bytes that the pixels take which are converted at once."""
SLACK = 32 * MB
"""Bytes that come and go with anything."""
SIDE = 3000
"""Of the large images: 9 million pixels, which the model takes as 9216."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with engine_process({"media_bytes": ROOM}) as running:
        # the first image of each form loads its codec; the first of all compiles the vision tower
        for form in ("PNG", "TIFF", "JPEG", "WEBP"):
            image = encoded(Image.new("RGB", (1500, 1500)), form)
            assert running.ask([part(image)])[0] == 200
        yield running


def deep_png(seed: int) -> bytes:
    """16 bits a pixel; no two alike."""
    pixels = np.zeros((SIDE, SIDE), np.uint16)
    pixels[0, 0] = seed
    return encoded(Image.fromarray(pixels), compress_level=1)


def grown(engine: EngineProcess, work: Callable[[], Any]) -> tuple[int, int]:
    """Bytes by which the engine grew at most, and those that it kept."""
    before = engine.forget_peak()
    work()
    most = engine.memory("VmHWM") - before
    kept = grown_since(engine, before)
    if kept > SLACK:  # the heap may keep what one image took, and uses it again
        work()
        kept = grown_since(engine, before + kept, 60)
    return most, kept


def grown_since(engine: EngineProcess, before: int, seconds: float = 5) -> int:
    """Bytes more than before, once the engine has cleared up after its answer."""
    grown = SLACK + 1
    for _ in range(int(20 * seconds)):
        time.sleep(0.05)
        grown = engine.memory("VmRSS") - before
        if grown <= SLACK:
            break
    return grown


def test_images_of_many_requests_are_decoded_in_turn(engine: EngineProcess) -> None:
    bodies = [[part(deep_png(2 * i + k)) for k in range(2)] for i in range(3)]

    def work() -> None:
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(engine.ask, body) for body in bodies]
            others = 0
            while not all(future.done() for future in running):
                assert engine.ask("Hello")[0] == 200
                others += 1
            assert {future.result()[0] for future in running} == {200}
            assert others

    most, kept = grown(engine, work)
    assert most < ROOM + SLACK
    assert kept < SLACK


@pytest.mark.parametrize("kind", ["RGBA", "F", "palette", "progressive", "webp"])
def test_a_large_image_takes_only_the_memory_of_its_codec(kind: str, engine: EngineProcess) -> None:
    form, options = "PNG", {"compress_level": 1}
    mode = kind if kind in ("RGBA", "F") else "P" if kind == "palette" else "RGB"
    if kind == "F":
        form, options = "TIFF", {"compression": "tiff_deflate"}
    elif kind == "progressive":
        form, options = "JPEG", {"progressive": True}
    elif kind == "webp":
        form, options = "WEBP", {"lossless": True, "quality": 0, "method": 0}
    elif kind == "palette":
        options = {"transparency": 0}
    data = encoded(Image.new(mode, (SIDE, SIDE)), form, **options)
    codec = {"progressive": 7, "webp": 16, "palette": 1}.get(kind, 4)
    most, kept = grown(engine, lambda: check(engine.ask([part(data)]), 200))
    assert most < codec * SIDE * SIDE + STRIPS + SLACK
    assert kept < SLACK


def large_webp(colour: int) -> bytes:
    image = Image.new("RGB", (SIDE, SIDE), (colour, 0, 0))
    return encoded(image, "WEBP", lossless=True, quality=0, method=0)


def test_large_webps_are_decoded_one_after_another(engine: EngineProcess) -> None:
    """Pillow's decoder takes two canvases as soon as it has read a header."""
    bodies = [[part(large_webp(2 * i + k)) for k in range(2)] for i in range(4)]

    def work() -> None:
        with ThreadPoolExecutor(4) as pool:
            assert {answer[0] for answer in pool.map(engine.ask, bodies)} == {200}

    most, kept = grown(engine, work)
    assert most < 16 * SIDE * SIDE + SLACK
    assert kept < SLACK
    most, _ = grown(engine, work)  # the features are known: only headers are read
    assert most < SLACK


def check(answer: tuple[int, list[dict[str, Any]]], status: int) -> None:
    assert answer[0] == status, answer
    if status != 200:
        assert answer[1][0]["code"] == "invalid_media"


def png_with(*chunks: bytes) -> bytes:
    data = encoded(Image.new("RGB", (40, 40)))
    return data[:33] + b"".join(chunks) + data[33:]


def tiff_with_tags(count: int) -> bytes:
    """Endless lists in tags that mean nothing here."""
    size = 8 * count
    data = encoded(Image.new("RGB", (40, 40)), "TIFF")
    start = struct.unpack("<I", data[4:8])[0]
    (tags,) = struct.unpack("<H", data[start : start + 2])
    entries = data[start + 2 : start + 2 + 12 * tags]
    at = len(data)
    more = b"".join(struct.pack("<HHII", 60000 + i, 5, count, at) for i in range(9))
    ifd = struct.pack("<H", tags + 9) + entries + more + bytes(4)
    return data[:4] + struct.pack("<I", at + size) + data[8:] + bytes(size) + ifd


def frames(form: str, count: int, **options: Any) -> bytes:
    first, *rest = (Image.new("RGB", (1000, 1000), (i, 0, 0)) for i in range(count))
    return encoded(first, form, save_all=True, append_images=rest, **options)


TEXT = zlib.compress(b"a" * (40 * MB), 9)
EXIF = b"MM\0*" + struct.pack(">IH", 8, 0xFFFF) + bytes(12 * 0xFFFF) + bytes(MB)
BOMBS: dict[str, tuple[Callable[[], bytes], int]] = {
    "zTXt": (lambda: png_with(chunk(b"zTXt", b"k\0\0" + TEXT)), 200),
    "iTXt": (lambda: png_with(chunk(b"iTXt", b"k\0\1\0\0\0" + TEXT)), 200),
    "iCCP": (lambda: png_with(chunk(b"iCCP", b"k\0\0" + TEXT)), 200),
    "EXIF": (lambda: png_with(chunk(b"eXIf", EXIF)), 200),
    "TIFF tile": (lambda: tiff_of_one_tile(16 * 1024, 64), 400),
    "TIFF tags": (lambda: tiff_with_tags(2**17), 200),
    "TIFF pages": (lambda: frames("TIFF", 12, compression="tiff_deflate"), 200),
    "APNG": (lambda: frames("PNG", 12), 200),
    "GIF": (lambda: frames("GIF", 12), 200),
    "WEBP": (lambda: frames("WEBP", 12, lossless=True, quality=0, method=0), 200),
}


@pytest.mark.parametrize("name", BOMBS)
def test_compressed_metadata_of_an_image_are_not_unpacked(name: str, engine: EngineProcess) -> None:
    make, status = BOMBS[name]
    bomb = part(make())
    most, _ = grown(engine, lambda: check(engine.ask([bomb]), status))
    assert most < SLACK


def test_the_bytes_of_an_image_are_copied_a_few_times_only(engine: EngineProcess) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (1800, 1800, 3), np.uint8)
    image = part(encoded(Image.fromarray(noise), compress_level=0))
    size = len(image["image_url"]["url"])
    assert size > 12 * MB
    most, kept = grown(engine, lambda: check(engine.ask([image]), 200))
    assert most < 6 * size
    assert kept < SLACK
