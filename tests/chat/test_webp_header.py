"""Sizes and turns of WebP files, as Pillow tells them."""

import io

import pytest
from PIL import Image

from mlx_provider.chat.media.decode import open_picture, rgb_pixels, webp_size
from mlx_provider.errors import MediaError
from tiny_pictures import encoded


def webp(mode="RGB", size=(37, 21), **options):
    return encoded(Image.new(mode, size), "WEBP", **options)


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
    "exif, and its name in later data": webp(exif=turned(6), xmp=b"made with EXIF tools " * 9),
    "largest": webp(size=(16383, 1)),
    "animated": webp(save_all=True, append_images=[Image.new("RGB", (37, 21), "red")]),
}


@pytest.mark.parametrize("name", FILES)
def test_size_and_orientation_of_a_webp_header_equal_pillows(name):
    size = webp_size(FILES[name])
    image = Image.open(io.BytesIO(FILES[name]))
    assert size == image.size
    picture = open_picture(FILES[name], "p", 10**9)
    turn = image.getexif().get(0x0112, 1)
    assert picture.orientation == turn
    assert (picture.width, picture.height) == (image.size if turn < 5 else image.size[::-1])


def test_the_webp_size_of_other_files_is_none():
    assert webp_size(b"") is None
    assert webp_size(b"RIFF0000WAVE") is None


@pytest.mark.parametrize("end", [12, 16, 20, 21, 24, 29])
@pytest.mark.parametrize("name", ["lossy", "lossless", "alpha"])
def test_a_cut_header_is_a_broken_image(name, end):
    with pytest.raises(MediaError):
        rgb_pixels(open_picture(FILES[name][:end], "p", 10**9))
