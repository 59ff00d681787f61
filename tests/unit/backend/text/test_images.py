"""Images of messages become patches, the same ones for the same pixels, or an error that names the field."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from backend.text.image_rules import ImageRules
from backend.text.images import ImageReader, prepare
from backend.text.media import ImageLimits, ImagePatches
from backend.text.messages import BadMessageError

PATH = "messages[0].content[1]"
URL = f"{PATH}.image_url.url"


@pytest.fixture
def reader() -> ImageReader:
    return ImageReader(ImageRules(), ImageLimits(max_bytes=200_000, max_pixels=1_000_000))


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = random.Random(width * 1000 + height).randbytes(width * height * 3)
    return Image.frombytes("RGB", (width, height), pixels).convert(mode)


def encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def part(data: bytes, media_type: str = "image/png") -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_url(data, media_type), "detail": "auto"}}


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def pixels_of(patches: ImagePatches, size: int = 14) -> np.ndarray:
    """The patches put together again: ``[height, width, 3]``."""
    grid = np.frombuffer(patches.patches, dtype=np.uint8).reshape(
        patches.rows, patches.columns, 3, size, size
    )
    return grid.transpose(0, 3, 1, 4, 2).reshape(patches.rows * size, patches.columns * size, 3)


class TestSizes:
    @pytest.mark.parametrize(
        ("size", "scaled", "num_tokens"),
        [
            ((224, 224), (224, 224), 64),
            ((1, 1), (1, 1), 1),
            ((29, 28), (29, 28), 2),
            ((1792, 1792), (1792, 1792), 4096),
            ((3584, 3584), (1792, 1792), 4096),
            ((4096, 4096), (1795, 1795), 65 * 65),
            ((28672, 224), (7168, 56), 512),
            ((13, 14336), (6, 7168), 256),
            ((7168, 1000), (4812, 671), 172 * 24),
        ],
    )
    def test_an_image_is_scaled_down_as_the_model_was_taught(
        self, size: tuple[int, int], scaled: tuple[int, int], num_tokens: int
    ) -> None:
        rules = ImageRules()
        assert rules.scaled_size(*size) == scaled
        width, height = rules.padded_size(*scaled)
        assert width % 28 == 0
        assert height % 28 == 0
        assert (width // 28) * (height // 28) == num_tokens

    def test_no_image_is_enlarged_and_none_is_larger_than_the_tower_can_place(self) -> None:
        rules, dice = ImageRules(), random.Random(7)
        for _ in range(2000):
            width, height = (max(1, int(2 ** dice.uniform(0, 15))) for _ in range(2))
            new_width, new_height = rules.scaled_size(width, height)
            assert 1 <= new_width <= width
            assert 1 <= new_height <= height
            padded = rules.padded_size(new_width, new_height)
            assert max(padded) <= 512 * 14
            # Padding may add a row and a column of tokens to what the limit says.
            assert padded[0] * padded[1] <= (16384 + 4 * (512 + 128)) * 14 * 14


class TestPatches:
    def test_a_small_image_keeps_its_pixels_and_gets_zeros_around(self) -> None:
        image = noise(37, 53)
        patches = prepare(image, ImageRules())
        assert (patches.rows, patches.columns, patches.num_tokens) == (4, 4, 4)
        pixels = pixels_of(patches)
        assert (pixels[:53, :37] == np.asarray(image)).all()
        assert not pixels[53:].any()
        assert not pixels[:, 37:].any()

    def test_a_large_image_is_scaled_by_the_bicubic_filter(self) -> None:
        image = noise(200, 100)
        rules = ImageRules(max_patches=18)
        patches = prepare(image, rules)
        scaled = image.resize(rules.scaled_size(200, 100), Image.Resampling.BICUBIC)
        assert scaled.size == (85, 42)
        assert (pixels_of(patches)[:42, :85] == np.asarray(scaled)).all()

    def test_the_first_patch_holds_colour_after_colour(self) -> None:
        image = noise(28, 28)
        first = np.frombuffer(prepare(image, ImageRules()).patches, dtype=np.uint8)[: 3 * 14 * 14]
        assert (first.reshape(3, 14, 14) == np.asarray(image)[:14, :14].transpose(2, 0, 1)).all()


class TestDigest:
    def test_one_pixel_makes_another_image(self) -> None:
        image, other = noise(40, 40), noise(40, 40)
        red, green, blue = other.getpixel((39, 39))
        other.putpixel((39, 39), (red, green, blue ^ 1))
        digests = {prepare(picture, ImageRules()).digest for picture in (image, other)}
        assert len(digests) == 2
        assert {len(digest) for digest in digests} == {32}

    def test_the_file_format_does_not_matter_but_the_rules_and_the_shape_do(
        self, reader: ImageReader
    ) -> None:
        image = noise(40, 20)
        png, webp = encode(image), encode(image, "WEBP", lossless=True)
        assert reader.read(part(png), PATH) == reader.read(part(webp, "image/webp"), PATH)
        turned = Image.frombytes("RGB", (20, 40), image.tobytes())
        digests = {
            prepare(image, ImageRules()).digest,
            prepare(turned, ImageRules()).digest,
            prepare(image, ImageRules(max_patches=100)).digest,
        }
        assert len(digests) == 3


class TestFormats:
    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
    def test_each_format_is_read(self, reader: ImageReader, kind: str) -> None:
        data = encode(noise(30, 30), kind)
        with Image.open(BytesIO(data)) as decoded:
            expected = np.asarray(decoded.convert("RGB"))
        patches = reader.read(part(data, "application/octet-stream"), PATH)
        assert (pixels_of(patches)[:30, :30] == expected).all()

    @pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
    def test_each_kind_of_colour_is_read(self, reader: ImageReader, mode: str) -> None:
        image = noise(30, 30).convert("L").convert(mode) if mode == "LA" else noise(30, 30, mode)
        data = encode(image, "JPEG" if mode == "CMYK" else "PNG")
        assert reader.read(part(data), PATH).num_tokens == 4

    def test_deep_grey_keeps_its_upper_bits(self, reader: ImageReader) -> None:
        values = np.full((28, 28), 0x8123, dtype=np.uint16)
        patches = reader.read(part(encode(Image.fromarray(values))), PATH)
        assert set(patches.patches) == {0x81}

    def test_transparent_palettes_are_read(self, reader: ImageReader) -> None:
        image = noise(28, 28, "P")
        data = encode(image, transparency=bytes(range(256)))
        assert (pixels_of(reader.read(part(data), PATH)) == np.asarray(image.convert("RGB"))).all()

    def test_an_animation_is_its_first_frame(self, reader: ImageReader) -> None:
        first, second = (Image.new("RGB", (28, 28), colour) for colour in ("red", "blue"))
        data = encode(first, "GIF", save_all=True, append_images=[second])
        assert (pixels_of(reader.read(part(data), PATH)) == [255, 0, 0]).all()


class TestForms:
    @pytest.mark.parametrize("name", ["image_url", "image"])
    def test_older_forms_of_the_part_are_read(self, reader: ImageReader, name: str) -> None:
        data = encode(noise(28, 28))
        expected = reader.read(part(data), PATH)
        assert reader.read({"type": name, name: data_url(data)}, PATH) == expected
        assert reader.read({"type": name, name: {"url": data_url(data)}}, PATH) == expected

    def test_base64_is_read_in_the_ways_that_it_is_written(self, reader: ImageReader) -> None:
        data = encode(noise(28, 28))
        url = data_url(data)
        head, text = url.split(",")
        expected = reader.read(part(data), PATH)
        lines = "\n".join(text[at : at + 76] for at in range(0, len(text), 76))
        escaped = text.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
        for variant in (lines, escaped, text.rstrip("="), f"{text}\n"):
            sent = {"type": "image_url", "image_url": {"url": f"{head.upper()},{variant}"}}
            assert reader.read(sent, PATH) == expected


def chunk(kind: bytes, data: bytes) -> bytes:
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def png_of_zeros(width: int, height: int, data: bytes) -> bytes:
    """A PNG that says it is so large, whatever it holds."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", data) + chunk(b"IEND", b"")


class TestRefusals:
    def refuse(self, reader: ImageReader, sent: dict[str, object]) -> BadMessageError:
        with pytest.raises(BadMessageError) as caught:
            reader.read(sent, PATH)
        return caught.value

    def wrong_field(self, reader: ImageReader, data: bytes) -> str | None:
        try:
            reader.read(part(data), PATH)
        except BadMessageError as error:
            return error.param
        return None

    @pytest.mark.parametrize(
        "url",
        [
            "https://example.com/cat.png",
            "http://2130706433/",
            "http://[::ffff:127.0.0.1]/",
            "http://0177.0.0.1/",
            "//localhost/cat.png",
            "file:///etc/passwd",
            "ftp://example.com/a.png",
            "cat.png",
            "",
        ],
    )
    def test_nothing_is_fetched(self, reader: ImageReader, url: str) -> None:
        error = self.refuse(reader, {"type": "image_url", "image_url": {"url": url}})
        assert error.param == URL
        assert error.code == "image_url_not_allowed"

    @pytest.mark.parametrize(
        "url",
        [
            "data:image/png",
            "data:image/png,abc",
            "data:image/png;base64,",
            "data:;base64,a*b=",
            "data:;base64,é",
        ],
    )
    def test_what_is_no_base64_is_named(self, reader: ImageReader, url: str) -> None:
        error = self.refuse(reader, {"type": "image_url", "image_url": {"url": url}})
        assert (error.param, error.code) == (URL, "invalid_value")

    @pytest.mark.parametrize(
        ("sent", "param"),
        [
            ({"type": "image_url"}, f"{PATH}.image_url"),
            ({"type": "image_url", "image_url": 3}, f"{PATH}.image_url"),
            ({"type": "image_url", "image_url": {}}, URL),
            ({"type": "image_url", "image_url": {"url": 7}}, URL),
        ],
    )
    def test_a_part_without_a_url_is_named(
        self, reader: ImageReader, sent: dict[str, object], param: str
    ) -> None:
        assert self.refuse(reader, sent).param == param

    @pytest.mark.parametrize(
        "data",
        [
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            b"hello",
            encode(noise(9, 9), "BMP"),
            b"%!PS-Adobe-3.0",
        ],
    )
    def test_other_formats_are_refused(self, reader: ImageReader, data: bytes) -> None:
        assert "is not a PNG, JPEG, WebP or GIF" in str(self.refuse(reader, part(data)))

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
    def test_damaged_files_are_refused_wherever_they_end(self, reader: ImageReader, kind: str) -> None:
        data = encode(noise(40, 40), kind)
        for length in range(1, len(data) - 12, max(1, len(data) // 60)):
            # What GIF has left out at its end is known to be empty.
            assert self.wrong_field(reader, data[:length]) in {URL, None if kind == "GIF" else URL}

    def test_files_with_wrong_bytes_never_fail_otherwise(self, reader: ImageReader) -> None:
        dice = random.Random(3)
        for kind in ("PNG", "JPEG", "WEBP", "GIF"):
            data = encode(noise(30, 30), kind)
            for _ in range(60):
                wrong = bytearray(data)
                wrong[dice.randrange(min(len(wrong), 200))] ^= 1 << dice.randrange(8)
                assert self.wrong_field(reader, bytes(wrong)) in {URL, None}

    @pytest.mark.parametrize("size", [(1001, 1000), (60_000, 60_000), (2**31 - 1, 1)])
    def test_a_bomb_is_refused_before_it_is_unpacked(
        self, reader: ImageReader, size: tuple[int, int]
    ) -> None:
        error = self.refuse(reader, part(png_of_zeros(*size, zlib.compress(bytes(5_000_000)))))
        assert (error.param, str(error)) == (URL, f"{URL}: the image has more than 1000000 pixels")

    def test_a_long_file_is_refused_before_it_is_decoded(self, reader: ImageReader) -> None:
        error = self.refuse(reader, part(bytes(200_001)))
        assert str(error) == f"{URL}: the image is larger than 200000 bytes"
