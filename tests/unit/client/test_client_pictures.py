"""Pictures in a terminal and histograms: bounded, of numbers alone, whatever a dataset holds."""

import io
import re
import struct
import zlib

import numpy as np
import pytest
from gyre_client.command.output import histogram_text, thumbnail
from gyre_client.display import Value, media_type, words_of
from gyre_daemon.datasets.codecs import length_histograms
from gyre_daemon.datasets.formats import FieldSpec
from gyre_daemon.datasets.formats.sample_table import SampleTable
from gyre_protos.v1 import loader_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image


def encoded(width: int, height: int, kind: str) -> bytes:
    image = Image.new("RGB", (width, height), (10, 200, 30))
    image.paste((250, 0, 0), (0, 0, width, height // 2))
    file = io.BytesIO()
    image.save(file, kind, lossless=True)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_a_picture_has_the_colours_of_its_image(kind: str) -> None:
    data = encoded(40, 20, kind)
    assert media_type(data) == f"image/{kind.lower()}"
    picture = thumbnail(data, 10, 4)
    assert picture
    assert len(picture.rows) in (5, 6)
    assert picture.rows[0] == [(250, 0, 0)] * 10
    lines = picture.drawn().split("\n")
    assert len(lines) == 3
    assert all(re.fullmatch(r"(\x1b\[[0-9;]+m\u2580){10}\x1b\[0m", line) for line in lines)


def test_an_image_that_declares_too_many_pixels_is_not_decoded() -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0" * 99))
    assert thumbnail(bomb, 10, 4) is None


@given(st.binary(max_size=60), st.integers(0, 400))
def test_damaged_images_are_none(noise: bytes, place: int) -> None:
    data = encoded(30, 30, "PNG")
    assert thumbnail(noise, 10, 4) is None
    picture = thumbnail(data[:place] + noise + data[place + len(noise) :], 10, 4)
    assert picture is None or len(picture.rows) <= 8
    assert thumbnail(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n" + noise, 9, 9) is None


lengths = st.lists(st.integers(0, 10**7), min_size=1, max_size=60)


@given(lengths, st.integers(20, 120))
def test_a_histogram_counts_every_sample_once(sizes: list[int], num_columns: int) -> None:
    size = np.array(sizes)[:, None]
    field = FieldSpec("t", np.dtype("<u2"), (), ragged=True, codec="bytes")
    index = SampleTable([field], [len(sizes)], size * 0, size * 2, identity=b"x")
    (found,) = length_histograms(index)
    assert sum(found.counts) == found.num_samples == len(sizes)
    assert (found.least, found.greatest) == (min(sizes), max(sizes))
    for first, stop, count in zip(found.bounds, found.bounds[1:], found.counts, strict=False):
        assert count == sum(first <= each < stop for each in sizes)
    message = pb.LengthHistogram(
        field="\x1b[2J<script>",
        bounds=found.bounds,
        counts=found.counts,
        least=found.least,
        greatest=found.greatest,
        mean=found.mean,
        num_samples=found.num_samples,
    )
    lines = histogram_text(message, num_columns).split("\n")
    assert len(lines) == len(found.counts) + 1 <= 21 + 1
    assert max(map(len, lines)) <= num_columns
    assert all(line.isprintable() for line in lines)


def test_values_in_words() -> None:
    assert words_of(Value("uint8", [3], b"\x1b[2")) == "\\x1b[2"
    assert words_of(Value("uint8", [400], b"x" * 400)) == "x" * 300 + " ..."
    assert words_of(Value("uint8", [4], b"\xff\x00\x01\x02")) == "bytes ff 00 01 02, 4 B"
    assert words_of(Value("uint8", [2000], b"\xff\xd8\xff" + bytes(1997))) == "image/jpeg, 2.0 KiB"
    assert words_of(Value("int64", [], np.array(7))) == "7"
    pairs = np.array([[1.0, 2.0], [3.0, 4.5]], np.float32)
    assert words_of(Value("float32", [2, 2], pairs)) == "[1, 2, 3, 4.5]"
    many = words_of(Value("int64", [100], np.arange(100)))
    assert many == "[0, 1, 2, 3, 4, 5, 6, 7, ...], 0 to 99, mean 49.5"
    odd = np.array([np.nan, np.inf, *[2.0] * 8])
    assert words_of(Value("float64", [10], odd)).endswith("2 to 2, mean 2")
    flags = np.array([True, False] * 5)
    assert words_of(Value("bool", [10], flags)).endswith("False to True, mean 0.5")
    assert words_of(Value("float64", [9], np.full(9, np.nan))).endswith("nan, ...]")
    assert words_of(Value("float64", [9], np.full(9, 1e308))).endswith("mean inf")
