"""Frames of videos, on files that FFmpeg writes: each frame is as bright as its number says."""

import io
from typing import Any

import av
import numpy as np
import pytest
from gyre_daemon.transforms import Field
from gyre_daemon.transforms.worker import Chain, TransformFailed
from gyre_media.video import DecodeVideo

NUM, RATE, STEP = 60, 10, 4
SIZE = (24, 32)
KINDS = {
    "mp4": "libx264",
    "webm": "libvpx",
    "matroska": "libx264",
    "avi": "mpeg4",
    "mpegts": "mpeg2video",
}


def written(kind: str = "mp4", codec: str = "", every: int = 12, rate: int = RATE) -> bytes:
    """A video of 60 frames of 48 x 64, with a key frame every so often."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream: Any = container.add_stream(codec or KINDS[kind], rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.gop_size, stream.bit_rate = every, 4_000_000
        stream.options = {"qp": "0"} if stream.codec.name == "libx264" else {}
        for number in range(NUM):
            gray = np.full((48, 64, 3), number * STEP, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(gray, "rgb24")))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def numbers(data: bytes, frames: int, seed: int = 0, **options: Any) -> list[int]:
    """Which frames are decoded."""
    decode = DecodeVideo("file", frames, SIZE, **options)
    chain = Chain([("decode_video", decode)], {"file": Field(np.dtype(np.uint8), (None,))})
    out = chain.scratch()
    chain.apply({"file": np.frombuffer(data, np.uint8)}, np.random.default_rng(seed), out)
    found = out["video"].astype(float)
    assert found.shape == (frames, *SIZE, 3)
    assert (found.max(axis=(1, 2, 3)) - found.min(axis=(1, 2, 3))).max() <= 4
    return [int(each) for each in np.rint(found.mean(axis=(1, 2, 3)) / STEP)]


@pytest.mark.parametrize("every", [5, 12, 60])
@pytest.mark.parametrize("frames", [1, 3, 8])
def test_frames_are_spread_over_a_video(every: int, frames: int) -> None:
    wanted = [int((place + 0.5) * NUM / frames + 1e-6) for place in range(frames)]
    assert numbers(written(every=every), frames) == wanted


def test_frames_have_a_rate() -> None:
    data = written(rate=30)
    assert numbers(data, 6, rate=10) == [0, 3, 6, 9, 12, 15]
    assert numbers(data, 5, rate=15, start="center")[0] == int((2 - 5 / 15) / 2 * 30)
    starts = {numbers(data, 4, seed, rate=30, start="random")[0] for seed in range(8)}
    assert len(starts) > 4
    assert max(starts) <= NUM - 4
    assert numbers(data, 3, rate=1) == [0, 30, 59]  # the last one where it has ended


@pytest.mark.parametrize("kind", KINDS)
def test_other_files_are_decoded(kind: str) -> None:
    found = numbers(written(kind), 4)
    assert np.abs(np.array(found) - [7, 22, 37, 52]).max() <= 1  # by how long it says it is


@pytest.mark.parametrize(
    ("data", "options", "reason"),
    [
        (written(), {"max_pixels": 3000}, "declares frames of 64 x 48 pixels; at most 3000"),
        (b"#EXTM3U\n#EXTINF:1,\n/etc/hosts\n", {}, "no video that can be decoded"),
        (b"ffconcat version 1.0\nfile /etc/hosts\n", {}, "no video that can be decoded"),
        (written()[:400], {}, "no video that can be decoded"),
        (b"", {}, "no video that can be decoded"),
    ],
)
def test_files_that_cannot_be_served_are_refused(
    data: bytes, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TransformFailed, match=reason):
        numbers(data, 2, **options)
