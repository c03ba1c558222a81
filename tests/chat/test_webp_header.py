"""Sizes and turns of WebP files, as Pillow tells them."""

from __future__ import annotations

import io
import struct

import pytest
from PIL import Image

from mlx_provider.chat.media.decode import CHUNKS, open_picture, read_header, rgb_pixels
from mlx_provider.errors import MediaError


def webp(mode="RGB", size=(37, 21), **options):
    out = io.BytesIO()
    Image.new(mode, size).save(out, "WEBP", **options)
    return out.getvalue()


def turned(by):
    exif = Image.Exif()
    exif[0x0112] = by
    return exif


FILES = {
    "lossy": webp(),
    "lossless": webp(lossless=True),
    "alpha": webp("RGBA"),
    "alpha, lossless": webp("RGBA", lossless=True),
    "exif": webp(exif=turned(6)),
    "largest": webp(size=(16383, 1)),
    "animated": webp(save_all=True, append_images=[Image.new("RGB", (37, 21), "red")]),
}


@pytest.mark.parametrize("name", FILES)
def test_the_header_says_what_pillow_says(name):
    header = read_header(FILES[name])
    image = Image.open(io.BytesIO(FILES[name]))
    assert (header.width, header.height) == image.size
    picture = open_picture(FILES[name], "p", 10**9)
    turn = image.getexif().get(0x0112, 1)
    assert picture.turn == turn
    assert (picture.width, picture.height) == (image.size if turn < 5 else image.size[::-1])


def test_other_files_are_none():
    assert read_header(b"") is None
    assert read_header(b"RIFF0000WAVE") is None


@pytest.mark.parametrize("end", [12, 16, 20, 21, 24, 29])
@pytest.mark.parametrize("name", ["lossy", "lossless", "alpha"])
def test_a_cut_header_is_a_broken_image(name, end):
    with pytest.raises(MediaError):
        rgb_pixels(open_picture(FILES[name][:end], "p", 10**9))


def test_endless_chunks_are_not_looked_through():
    head = b"VP8X" + struct.pack("<I", 10) + b"\x08\0\0\0" + b"\x24\0\0" + b"\x14\0\0"
    chunks = (b"JUNK" + struct.pack("<I", 0)) * (2 * CHUNKS)
    body = b"WEBP" + head + chunks + b"EXIF" + struct.pack("<I", 4) + b"late"
    header = read_header(b"RIFF" + struct.pack("<I", len(body)) + body)
    assert (header.width, header.height, header.exif) == (37, 21, b"")
