"""Loading media: spellings, bounds, decoding of every kind of picture, and broken ones."""

import base64
import hashlib
import io
import json
import struct
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from mlx_provider.chat.media import decode as media_decode
from mlx_provider.chat.media.load import MediaPolicy, MediaRoom, load_media
from mlx_provider.chat.messages.normalise import normalise
from mlx_provider.chat.messages.parts import Detail, MediaRef
from mlx_provider.errors import MediaError, Overloaded, RequestFailed
from mlx_provider.records import MediaItem
from tiny_pictures import chunk, data_url, encoded, tiff_of_one_tile

DATA = Path(__file__).parents[1] / "data" / "chat"
CLIENTS = json.loads((DATA / "client_messages.json").read_text())


def ref(data: bytes, detail: Detail = "auto") -> MediaRef:
    return MediaRef("image", data_url(data), "messages[0].content[1]", detail)


def load(data: bytes, **policy: Any) -> MediaItem:
    return load_media([ref(data)], MediaPolicy(**policy))[0]


def refuse(*refs: MediaRef, **policy: Any) -> str:
    with pytest.raises(MediaError) as refused:
        [item.pixels for item in load_media(refs, MediaPolicy(**policy))]
    assert refused.value.param is not None
    assert refused.value.message.startswith(refused.value.param)
    return refused.value.message


def solid(mode: str, color: Any, size: tuple[int, int] = (5, 3)) -> Image.Image:
    return Image.new(mode, size, color)


def test_equal_images_in_different_spellings_have_one_hash() -> None:
    refs = normalise(CLIENTS["05"], hoist_system=False).media
    items = load_media([r for r in refs if str(r.source).startswith("data:")])
    assert [item.pixels.shape for item in items] == [
        (64, 64, 3), (56, 112, 3), (64, 64, 3), (56, 112, 3),
    ]  # fmt: skip
    assert [item.detail for item in items] == ["low", "auto", "auto", "auto"]
    assert items[0].content_hash == items[2].content_hash != items[1].content_hash
    file = next(r for r in refs if str(r.source).startswith("file:"))
    assert "allow_media: [file]" in refuse(file)


def test_an_image_of_one_pixel_is_decoded_and_its_bytes_are_hashed() -> None:
    data = encoded(solid("RGB", (1, 2, 3), (1, 1)))
    item = load(data)
    assert item.content_hash == hashlib.sha256(data).hexdigest()
    assert item.pixels.dtype == np.uint8
    assert item.pixels.tolist() == [[[1, 2, 3]]]


COLORS: list[tuple[str, bytes, tuple[int, int, int]]] = [
    ("rgb", encoded(solid("RGB", (255, 0, 0))), (255, 0, 0)),
    ("cmyk", encoded(solid("CMYK", (0, 255, 255, 0)), "JPEG", quality=100), (255, 0, 0)),
    ("grey", encoded(solid("L", 128)), (128, 128, 128)),
    ("bits", encoded(solid("1", 1)), (255, 255, 255)),
    ("16 bits", encoded(solid("I;16", 0x8080)), (128, 128, 128)),
    ("float", encoded(solid("F", 0.5), "TIFF"), (128, 128, 128)),
    ("half transparent", encoded(solid("RGBA", (255, 0, 0, 0))), (255, 255, 255)),
    ("grey with alpha", encoded(solid("LA", (0, 255))), (0, 0, 0)),
    ("palette", encoded(solid("RGB", "blue").quantize()), (0, 0, 255)),
    ("webp", encoded(solid("RGB", "red"), "WEBP", lossless=True), (255, 0, 0)),
    ("bmp", encoded(solid("RGB", "red"), "BMP"), (255, 0, 0)),
]


@pytest.mark.parametrize(("data", "color"), [c[1:] for c in COLORS], ids=[c[0] for c in COLORS])
def test_every_image_mode_is_converted_to_rgb(data: bytes, color: tuple[int, int, int]) -> None:
    pixels = load(data).pixels
    assert pixels.shape == (3, 5, 3)
    assert np.abs(pixels.astype(int) - np.array(color)).max() <= 2


@pytest.mark.parametrize("most", [1.0, 255.0])
def test_a_level_that_is_no_number_is_black_and_no_other_level_changes(most: float) -> None:
    levels = np.array([[np.nan, most], [np.nan, 0]], np.float32)
    pixels = load(encoded(Image.fromarray(levels), "TIFF")).pixels
    assert pixels[:, :, 0].tolist() == [[0, 255], [0, 0]]
    half = np.array([[np.nan, most / 2, most]], np.float32)
    assert load(encoded(Image.fromarray(half), "TIFF")).pixels[0, :, 0].tolist() == [0, 128, 255]


def test_transparent_palette_stands_on_white() -> None:
    image = Image.new("P", (2, 1), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    pixels = load(encoded(image, transparency=0)).pixels
    assert pixels.tolist() == [[[255, 255, 255], [0, 0, 255]]]


def test_animation_gives_its_first_frame() -> None:
    frames = [solid("RGB", "red"), solid("RGB", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert load(data).pixels[0, 0].tolist() == [255, 0, 0]


def orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds hardly any data."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("size", [(100_000, 50_000), (2**31 - 1, 1), (8_001, 8_001)])
def test_absurd_size_is_refused_before_decoding(size: tuple[int, int]) -> None:
    message = refuse(ref(png_header(*size)))
    assert f"{size[0]} × {size[1]} pixels" in message


def test_images_of_one_request_share_a_bound() -> None:
    data = encoded(solid("RGB", "red", (10, 10)))
    assert len(load_media([ref(data)] * 3, MediaPolicy(max_total_pixels=300))) == 3
    assert "together" in refuse(*[ref(data)] * 4, max_total_pixels=300)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_truncated_image_is_refused(form: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)
    data = encoded(Image.fromarray(noise), form)
    assert load(data).pixels.shape == (40, 40, 3)
    assert "truncated" in refuse(ref(data[: len(data) // 2]))


def png_with(*chunks: bytes, late: bytes = b"", end: int = 0, alpha: bool = False) -> bytes:
    image = PHOTO.quantize(16) if alpha else PHOTO
    data = encoded(image, **({"transparency": 0} if alpha else {}))
    if alpha and not chunks:  # a wrong checksum of the colour's transparency
        at = data.index(b"tRNS") + 4 + int.from_bytes(data[data.index(b"tRNS") - 4 :][:4])
        return data[:at] + b"????" + data[at + 4 :]
    body = data[:33] + b"".join(chunks) + data[33:-12] + late + data[-12:]
    return body[:-end] if end else body


def jpeg_with(*segments: tuple[int, bytes], **options: Any) -> bytes:
    data = encoded(PHOTO, "JPEG", **options)
    made = [b"\xff" + bytes([k]) + struct.pack(">H", len(b) + 2) + b for k, b in segments]
    return data[:2] + b"".join(made) + data[2:]


def webp_with(kind: bytes, body: bytes) -> bytes:
    data = encoded(PHOTO, "WEBP", exif=orientation(6), lossless=True)
    at = data.index(b"EXIF")
    body = data[12:at] + kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 40, 3), np.uint8))
LONG = zlib.compress(b"a" * 3 * 2**20)
TURNED = orientation(6).tobytes()[6:]
METADATA: dict[str, Callable[[], bytes]] = {
    "PNG, EXIF of junk": lambda: png_with(chunk(b"eXIf", b"junk junk")),
    "PNG, EXIF of zeros": lambda: png_with(chunk(b"eXIf", bytes(99))),
    "PNG, no EXIF": lambda: png_with(chunk(b"eXIf", b"")),
    "PNG, EXIF cut": lambda: png_with(chunk(b"eXIf", TURNED[:12])),
    "PNG, a long zTXt": lambda: png_with(chunk(b"zTXt", b"k\0\0" + LONG)),
    "PNG, a late zTXt": lambda: png_with(late=chunk(b"zTXt", b"k\0\0" + LONG)),
    "PNG, a long iTXt": lambda: png_with(chunk(b"iTXt", b"k\0\1\0\0\0" + LONG)),
    "PNG, a long tEXt": lambda: png_with(chunk(b"tEXt", b"k\0" + b"a" * 3 * 2**20)),
    "PNG, a bad iCCP": lambda: png_with(chunk(b"iCCP", b"k\0\0" + LONG)),
    "PNG, a wrong tEXt": lambda: png_with(chunk(b"tEXt", b"k\0v", crc=1)),
    "PNG, a wrong late tEXt": lambda: png_with(late=chunk(b"tEXt", b"k\0v", crc=1)),
    "PNG, a short pHYs": lambda: png_with(chunk(b"pHYs", b"1")),
    "PNG, no end": lambda: png_with(end=12),
    "PNG, half an end": lambda: png_with(end=5),
    "PNG, a cut late chunk": lambda: png_with(late=b"\0\1\0\0tEXtk"),
    "JPEG, no end": lambda: jpeg_with()[:-2],
    "JPEG, half an end": lambda: jpeg_with()[:-1],
    "JPEG, no end, a thumbnail": lambda: jpeg_with((0xED, b"\xff\xd8\xff\xd9"))[:-2],
    "JPEG, progressive, no end": lambda: jpeg_with(progressive=True)[:-2],
    "JPEG, EXIF of junk": lambda: jpeg_with((0xE1, b"Exif\0\0junk junk junk")),
    "JPEG, an odd MPF": lambda: jpeg_with((0xE2, b"MPF\0junk junk junk junk")),
    "JPEG, an odd profile": lambda: jpeg_with((0xE2, b"ICC_PROFILE\0")),
    "JPEG, odd resources": lambda: jpeg_with((0xED, b"Photoshop 3.0\x008BIM\x03\xed")),
    "WEBP, EXIF of junk": lambda: webp_with(b"EXIF", b"junk junk "),
    "WEBP, EXIF of zeros": lambda: webp_with(b"EXIF", bytes(40)),
    "WEBP, odd XMP": lambda: webp_with(b"XMP ", b"\0\xff" * 8),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's
@pytest.mark.parametrize("name", METADATA)
def test_broken_metadata_do_not_refuse_an_image(name: str) -> None:
    data = METADATA[name]()
    options: Any = {"progressive": True} if "progressive" in name else {}
    same = load(encoded(PHOTO, name.partition(",")[0], **options, **LOSSLESS.get(name[:4], {})))
    item = load(data)
    assert np.array_equal(item.pixels, same.pixels)
    assert item.scale(24, 20).shape == (24, 20, 3)


LOSSLESS: dict[str, Any] = {"WEBP": {"lossless": True}}


def test_valid_metadata_are_used_although_other_metadata_are_broken() -> None:
    bad = chunk(b"tEXt", b"k\0v", crc=1)
    assert load(png_with(bad, chunk(b"eXIf", TURNED))).pixels.shape == (40, 48, 3)
    assert (load(png_with(alpha=True)).pixels == 255).all(axis=-1).any()


def test_an_image_with_missing_pixels_is_refused() -> None:
    for options in ({}, {"progressive": True}, {"quality": 5}):
        data = encoded(PHOTO, "JPEG", **options)
        for cut in (5, 40, len(data) // 9):
            assert "truncated" in refuse(ref(data[:-cut]))
    data = encoded(PHOTO)
    assert "truncated" in refuse(ref(data[: data.index(b"IDAT") + 9] + b"?" + data[60:]))


@pytest.mark.parametrize(
    "source",
    [
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:image/png;base64,$$$",
        "data:image/png;base64,A",
        "data:image/png;base64,aGVsbG8gd29ybGQ=",
        "data:text/html,<html>",
        "data:application/postscript;base64," + base64.b64encode(b"%!PS-Adobe-3.0 EPSF").decode(),
    ],
)
def test_a_malformed_data_url_is_refused(source: str) -> None:
    refuse(MediaRef("image", source, "messages[2].content[0]"))


def test_every_spelling_of_a_data_url_is_decoded() -> None:
    data = encoded(solid("RGB", "red"))
    text = base64.b64encode(data).decode()
    for source in (
        f"DATA:image/png;base64,{text}",
        f"data:;base64,{text.rstrip('=')}",
        "data:image/png;base64," + "\n".join(text[i : i + 20] for i in range(0, len(text), 20)),
        "data:image/png;base64," + base64.urlsafe_b64encode(data).decode(),
        "data:image/png," + "".join(f"%{byte:02x}" for byte in data),
    ):
        assert load_media([MediaRef("image", source, "p")])[0].pixels.shape == (3, 5, 3)


def test_an_image_file_above_the_byte_limit_is_refused() -> None:
    assert "more than 20" in refuse(ref(encoded(solid("RGB", "red"))), max_bytes=20)


@pytest.mark.parametrize(
    "source", ["file:///etc/passwd", "/etc/passwd", "FILE:/etc/passwd", "../x.png", "iVBORw0KGgo"]
)
def test_local_files_are_refused(source: str) -> None:
    message = refuse(MediaRef("image", source, "messages[0].content[0]"))
    assert "local file" in message
    assert "root" not in message


@pytest.mark.parametrize("source", ["ftp://example.com/a.png", "blob:x", "javascript:alert(1)"])
def test_other_schemes_are_refused(source: str) -> None:
    refuse(MediaRef("image", source, "p"), allow_file=True, allow_private=True)


def test_a_local_file_is_loaded_if_the_policy_allows_files(tmp_path: Path) -> None:
    file = tmp_path / "a b.png"
    file.write_bytes(encoded(solid("RGB", "red")))
    policy = MediaPolicy(allow_file=True)
    for source in (str(file), file.as_uri()):
        assert load_media([MediaRef("image", source, "p")], policy)[0].pixels.shape == (3, 5, 3)
    for source in ("/dev/zero", str(tmp_path), str(tmp_path / "none.png"), "a\0b"):
        refuse(MediaRef("image", source, "p"), allow_file=True)
    refuse(MediaRef("image", str(file), "p"), allow_file=True, max_bytes=10)


def video(*frames: Image.Image) -> MediaRef:
    return MediaRef("video", tuple(data_url(encoded(frame)) for frame in frames), "p")


def test_video_is_a_list_of_frames() -> None:
    red, blue = solid("RGB", "red"), solid("RGB", "blue")
    item, other, image = load_media([video(red, blue), video(blue, red), ref(encoded(red))])
    assert (item.kind, image.kind) == ("video", "image")
    assert item.pixels.shape == (2, 3, 5, 3)
    assert item.pixels[1, 0, 0].tolist() == [0, 0, 255]
    assert len({item.content_hash, other.content_hash, image.content_hash}) == 3


def test_a_video_with_too_many_unequal_or_broken_frames_is_refused() -> None:
    red = solid("RGB", "red")
    assert "1 to 2 frames, not 3" in refuse(video(red, red, red), max_frames=2)
    assert "one size" in refuse(video(red, solid("RGB", "red", (4, 4))))
    broken = MediaRef("video", (data_url(encoded(red)), "data:,x"), "p")
    assert refuse(broken).startswith("p.video[1]")


def test_shapes_are_those_of_the_pixels_and_need_no_decoding() -> None:
    images = [encoded(solid("RGB", "red", (8, 4)), "PNG", exif=orientation(n)) for n in range(9)]
    images += [encoded(solid("RGB", "red", (8, 4)), "TIFF", exif=orientation(6))]
    images += [encoded(solid("RGB", "red", (8, 4)), "WEBP", exif=orientation(8))]
    images += [encoded(solid("RGB", "red", (8, 4)), "JPEG", exif=orientation(6))]
    assert load(images[-1]).shape == (8, 4, 3)
    late = images[6]  # EXIF after the pixels
    at = late.index(b"eXIf") - 4
    end = at + 12 + int.from_bytes(late[at : at + 4])
    images += [late[:at] + late[end:-12] + late[at:end] + late[-12:]]
    for data in images:
        one = load(data)
        assert one.pixels.shape == one.shape
    assert load(images[-1]).shape == load(late).shape == (8, 4, 3)


def test_an_orientation_outside_of_exif_chunks_is_applied() -> None:
    red, text = solid("RGB", "red", (8, 4)), PngInfo()
    text.add_text("Raw profile type exif", f"\nexif\n{len(TURNED)}\n{TURNED.hex()}\n", zip=True)
    png, jpeg = encoded(red, pnginfo=text), encoded(red, "JPEG", xmp=b'tiff:Orientation="6"')
    assert load(png).shape == load(jpeg).shape == (8, 4, 3)


@pytest.mark.parametrize("turn", range(1, 9))
def test_an_image_is_turned_as_pillow_turns_it(turn: int) -> None:
    noise = np.random.default_rng(turn).integers(0, 255, (6, 9, 3), np.uint8)
    data = encoded(Image.fromarray(noise), "PNG", exif=orientation(turn))
    want = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert (load(data).pixels == want).all()


def smooth(height: int, width: int) -> Image.Image:
    """Colours that change slowly."""
    grid = np.random.default_rng(1).integers(0, 255, (5, 7, 3), np.uint8)
    return Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)


def test_images_below_four_times_the_target_are_scaled_exactly_as_by_pillow() -> None:
    image = smooth(399, 500)
    for form in ("PNG", "WEBP"):
        data = encoded(image, form, **({"lossless": True} if form == "WEBP" else {}))
        for size in ((100, 130), (399, 500), (50, 400), (700, 800)):
            want = np.asarray(image.resize(size[::-1], Image.Resampling.BICUBIC))
            assert (load(data).scale(*size) == want).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "I;16", "CMYK", "F"])
def test_far_larger_images_are_close_to_pillow(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_decode, "STRIP_PIXELS", 5000)
    image = smooth(643, 517).convert("L" if mode in ("I;16", "F") else "RGB")
    if mode == "I;16":
        made = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    else:
        made = image.quantize() if mode == "P" else image.convert(mode)
    form = {"F": "TIFF", "CMYK": "JPEG"}.get(mode, "PNG")
    item = load(encoded(made, form, **({"quality": 100} if form == "JPEG" else {})))
    want = np.asarray(Image.fromarray(item.pixels).resize((60, 70), Image.Resampling.BICUBIC))
    apart = np.abs(item.scale(70, 60).astype(int) - want)
    assert apart.mean() < 1.5
    assert item.scale(70, 60).shape == (70, 60, 3)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 11])
def test_a_jpeg_is_decoded_at_reduced_size_close_to_pillow(n: int) -> None:
    image = smooth(1201, 901)
    item = load(encoded(image, "JPEG", quality=95))
    size = (1201 // (2 * n), 901 // (2 * n))
    want = np.asarray(image.resize(size[::-1], Image.Resampling.BICUBIC))
    assert np.abs(item.scale(*size).astype(int) - want).mean() < 2


def test_the_estimate_for_a_rotated_jpeg_covers_the_measured_peak() -> None:
    picture = media_decode.Picture.of(b"", "", (12_000, 8_000), 6, "JPEG", "L", False)
    assert picture.reduction((2000, 1300)) == 3
    assert picture.decoding_bytes((2000, 1300)) > 191 * 10**6


def test_tiff_tiles_that_are_larger_than_the_image() -> None:
    assert load(tiff_of_one_tile(256, 100)).pixels.shape == (100, 100, 3)
    assert "in tiles of 4000000 pixels" in refuse(ref(tiff_of_one_tile(2000, 100)))


def test_a_claim_counts_the_file_bytes_and_the_pixels_that_the_model_takes() -> None:
    room = MediaRoom(2 * 10**6)
    claim = room.claim("one")
    data = encoded(solid("RGB", "red", (100, 100)))
    items = load_media([ref(data), ref(data)], None, claim, max_pixels=5000)
    assert room.nbytes == 2 * len(data) + 2 * 3 * 5000
    items[0].pixels  # noqa: B018
    assert room.nbytes == 2 * len(data) + 2 * 3 * 5000
    claim.end_prefill()
    assert room.nbytes == 2 * len(data)
    claim.close()
    claim.close()
    assert room.nbytes == 0


def test_images_wait_for_memory_in_order_and_a_waiting_one_can_give_up() -> None:
    room = MediaRoom(40_000, line=2)
    first = room.claim("first")
    first.take(15_000, 0)
    data = encoded(solid("RGB", "red", (40, 40)))
    with ThreadPoolExecutor(2) as pool:
        gone = pool.submit(load_media, [ref(data)] * 3, None, room.claim("gone"))
        while not room.kept.count_waiting():
            time.sleep(0.001)
        large = room.claim("large")
        last = pool.submit(load_media, [ref(data)] * 9, None, large)
        while room.kept.count_waiting() < 2:
            time.sleep(0.001)
        with pytest.raises(Overloaded, match="2 requests wait"):
            load_media([ref(data)] * 3, None, room.claim("one too many"))
        room.refuse(RequestFailed("the request was cancelled"), "gone")
        with pytest.raises(RequestFailed):
            gone.result()
        assert not last.done()
        first.close()
        assert len(last.result()) == 9, "what is larger than the room has it alone"
    large.close()
    assert room.nbytes == 0


def test_an_image_part_without_a_source_is_refused() -> None:
    bare = normalise([{"role": "user", "content": [{"type": "image"}]}], hoist_system=False)
    assert "no source" in refuse(*bare.media)


SEEDS = [
    encoded(Image.effect_noise((9, 7), 80).convert(mode), form)
    for mode, form in [
        ("RGB", "PNG"), ("P", "PNG"), ("RGB", "JPEG"), ("P", "GIF"), ("RGB", "WEBP"),
        ("RGB", "BMP"), ("RGB", "TIFF"), ("RGB", "PPM"), ("RGB", "AVIF"),
    ]
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@given(st.data())
def test_loading_damaged_bytes_raises_only_media_errors(draw: st.DataObject) -> None:
    data = bytearray(draw.draw(st.sampled_from(SEEDS)))
    for _ in range(draw.draw(st.integers(1, 6))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    cut = draw.draw(st.integers(1, len(data)))
    with suppress(MediaError):
        pixels = load(bytes(data[:cut]), max_pixels=10_000).pixels
        assert pixels.ndim == 3
        assert pixels.shape[2] == 3
