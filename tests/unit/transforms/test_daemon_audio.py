"""Transforms of sounds, on files that libsndfile writes, compared with torch's spectra."""

import io
import math
import struct
from typing import Any

import numpy as np
import pytest
import scipy
import soundfile
import torch
from gyre_daemon.transforms import Field, Transform
from gyre_daemon.transforms.built_in import CropOrPad, Truncate
from gyre_daemon.transforms.worker import Chain, TransformFailed
from gyre_media.audio import DecodeAudio, LogMel

BYTES = {"file": Field(np.dtype(np.uint8), (None,))}
Sound = np.ndarray[Any, Any]


def sound(num: int = 8000, channels: int = 1, rate: int = 16_000) -> Sound:
    """Some tones, float32 [n, channels] between -0.6 and 0.6."""
    times = np.arange(num)[:, None] / rate
    tones = 220.0 * (1 + np.arange(channels))
    made: Sound = 0.4 * np.sin(2 * np.pi * tones * times) + 0.2 * np.sin(4444 * times)
    return made.astype(np.float32)


def encoded(samples: Sound, kind: str = "WAV", rate: int = 16_000) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind)
    return buffer.getvalue()


def run(data: bytes, *transforms: Transform, name: str = "audio") -> Sound:
    chain = Chain([(type(each).__name__, each) for each in transforms], BYTES)
    out = chain.scratch()
    sample: dict[str, Sound] = {"file": np.frombuffer(data, np.uint8)}
    chain.apply(sample, np.random.default_rng(0), out)
    return {**sample, **out}[name]


@pytest.mark.parametrize(
    ("kind", "most"), [("WAV", 1e-4), ("FLAC", 1e-4), ("OGG", 0.1), ("MP3", 0.1)]
)
@pytest.mark.parametrize("channels", [1, 2])
def test_files_are_decoded(kind: str, most: float, channels: int) -> None:
    wanted = sound(channels=channels)
    data = encoded(wanted, kind)
    found = run(data, DecodeAudio("file", 16_000, channels=channels)).reshape(-1, channels)
    assert found.dtype == np.float32
    assert abs(len(found) - len(wanted)) <= (2400 if kind == "MP3" else 0)
    inner = slice(2000, 6000)
    assert np.abs(found[inner] - wanted[inner]).max() <= most
    mixed = run(data, DecodeAudio("file", 16_000))
    assert np.abs(mixed - found.mean(axis=1)).max() < 1e-6


@pytest.mark.parametrize("rate", [8000, 22_050, 44_100])
def test_sounds_are_resampled(rate: int) -> None:
    found = run(encoded(sound(rate, rate=rate), rate=rate), DecodeAudio("file", 16_000))
    assert len(found) == 16_000
    wanted = scipy.signal.resample_poly(sound(rate, rate=rate)[:, 0], 16_000, rate)
    assert np.abs(found - wanted)[1000:-1000].max() < 2e-3


@pytest.mark.parametrize("start", ["beginning", "center", "random"])
def test_sounds_get_one_length(start: Any) -> None:
    data = encoded(sound(2000), "FLAC")
    whole = run(data, DecodeAudio("file", 16_000))
    crop = CropOrPad("audio", 500, start=start)
    begin = {"beginning": 0, "center": 750}.get(start, np.random.default_rng(0).integers(1501))
    assert np.array_equal(run(data, DecodeAudio("file", 16_000), crop), whole[begin : begin + 500])
    padded = run(data, DecodeAudio("file", 16_000), CropOrPad("audio", 2500, start=start))
    assert np.array_equal(padded[:2000], whole)
    assert not padded[2000:].any()
    for length, kept in ((500, whole[begin : begin + 500]), (2500, whole)):
        found = run(data, DecodeAudio("file", 16_000), Truncate("audio", length, start=start))
        assert np.array_equal(found, kept)


@pytest.mark.parametrize(
    "options", [{}, {"mels": 40, "window": 512, "hop": 128, "low": 50.0}, {"window": 401}]
)
def test_log_mel_is_that_of_torchaudio(options: dict[str, Any]) -> None:
    """By torchaudio's formulas, as its documentation has them, and torch's spectra."""
    rate, length, mel = 16_000, 4000, LogMel(16_000, **options)
    noise = np.random.default_rng(1).normal(0, 0.1, (length, 1)).astype(np.float32)
    samples = sound(length) / 2 + noise
    chain = DecodeAudio("file", rate), CropOrPad("audio", length), mel
    found = run(encoded(samples, "FLAC"), *chain)
    stored = torch.tensor(run(encoded(samples, "FLAC"), chain[0]))
    spectra = torch.stft(
        stored, mel.window, mel.hop, window=torch.hann_window(mel.window), return_complex=True
    )
    frequencies = torch.linspace(0, rate // 2, mel.window // 2 + 1)
    low, high = (2595 * math.log10(1 + each / 700) for each in (mel.low, rate / 2))
    corners = 700 * (10 ** (torch.linspace(low, high, mel.mels + 2) / 2595) - 1)
    slopes = corners[None] - frequencies[:, None]
    falling, rising = slopes[:, 2:] / corners.diff()[1:], -slopes[:, :-2] / corners.diff()[:-1]
    triangles = torch.minimum(falling, rising).clamp(min=0)
    wanted = (triangles.T @ spectra.abs().square()).clamp(min=1e-10).log()
    assert found.shape == wanted.shape
    assert np.abs(found - wanted.numpy()).max() < 2e-3


def forged_flac() -> bytes:
    """A FLAC file whose header says 2^36 - 1 samples."""
    data = bytearray(encoded(sound(), "FLAC"))
    (packed,) = struct.unpack(">Q", data[18:26])
    data[18:26] = struct.pack(">Q", packed | (1 << 36) - 1)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "options", "reason"),
    [
        (forged_flac(), {}, r"declares 68719476735 samples .* at most 600 seconds"),
        (encoded(sound()), {"max_seconds": 0.4}, "declares 8000 samples .* at most 0.4 seconds"),
        (encoded(sound()), {"channels": 2}, "has 1 channels, and `channels` is 2"),
        (b"RIFF", {}, "no sound that can be decoded"),
        (b"", {}, "no sound that can be decoded"),
    ],
)
def test_files_that_cannot_be_served_are_refused(
    data: bytes, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TransformFailed, match=reason):
        run(data, DecodeAudio("file", 16_000, **options), CropOrPad("audio", 100))


def test_sound_that_takes_too_much_memory_is_refused_before_it_is_decoded() -> None:
    """A low rate lets a short file declare few seconds, and many samples at the rate of the job."""
    data = encoded(sound(40_000), "FLAC", rate=10)
    with pytest.raises(TransformFailed, match=r"declares 40000 samples .* take 1\d{10} bytes"):
        run(data, DecodeAudio("file", 1 << 20, max_seconds=5000))


def test_a_file_that_ends_early_is_refused() -> None:
    data = encoded(sound(20_000), "FLAC")
    with pytest.raises(TransformFailed, match=r"no sound|ends after"):
        run(data[: len(data) // 2], DecodeAudio("file", 16_000), CropOrPad("audio", 100))


def with_size(data: bytes, chunk: bytes, size: int, form: str = "<I") -> bytes:
    """A file whose header says another size of a chunk."""
    at = data.index(chunk) + 4
    made = struct.pack(form, size)
    return data[:at] + made + data[at + len(made) :]


WAV, FLAC, RF64 = (encoded(sound(), kind) for kind in ("WAV", "FLAC", "RF64"))
OPEN_FLAC = FLAC[:21] + bytes([FLAC[21] & 0xF0]) + bytes(4) + FLAC[26:]
LIST = b"LIST\4\0\0\0abcd"


@pytest.mark.parametrize(
    "data",
    [
        *(with_size(WAV, b"data", size) for size in (0x7FFFF000, 0x7FFFFFFF, 0xFFFFFFFF)),
        *(with_size(WAV, b"RIFF", size) for size in (0, 0xFFFFFFFF)),
        WAV + LIST,
        WAV + bytes(100),
        RF64,
        with_size(encoded(sound(), "AU"), b"\0\0\0\x18", (1 << 32) - 1, ">I"),
        OPEN_FLAC,
        b"ID3\4\0\0\0\0\0\5title" + FLAC,
    ],
)
def test_all_of_a_file_is_served_whatever_its_header_says(data: bytes) -> None:
    found = run(data, DecodeAudio("file", 16_000))
    assert len(found) == 8000
    assert np.abs(found - sound()[:, 0]).max() < 1e-4


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (WAV[:-1000], "is cut: its header says 16044 bytes, and it has 15044"),
        (encoded(sound(), "AIFF")[:-9], "is cut: its header says"),
        (with_size(WAV, b"data", 0), "is cut: it ends after 0 of 0 samples"),
        (2 * WAV, "no sound that can be decoded"),
        (FLAC[:-50], "no sound that can be decoded"),
        (OPEN_FLAC[:-50], "no sound that can be decoded"),
        (encoded(sound(), "OGG")[:-9], "is cut: it ends after 0 of 0 samples"),
        (encoded(sound(), "MP3")[:-9], r"is cut: it ends after \d+ of 8000 samples"),
        (encoded(sound(), "MP3")[:1000], r"is cut: it ends after \d+ of 8000 samples"),
    ],
)
def test_a_file_that_is_cut_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(TransformFailed, match=reason):
        run(data, DecodeAudio("file", 16_000))


@pytest.mark.parametrize(
    ("transforms", "reason"),
    [
        ([DecodeAudio("file", 8000), LogMel(8000)], "differ in length; put crop_or_pad"),
        ([DecodeAudio("file", 8000, channels=2), LogMel(8000)], "no sound of one channel"),
        ([DecodeAudio("file", 8000), CropOrPad("audio", 150), LogMel(8000)], "150 samples are too"),
    ],
)
def test_chains_that_make_no_sense_are_refused(transforms: list[Transform], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Chain([(type(each).__name__, each) for each in transforms], BYTES)
    with pytest.raises(ValueError, match="they must rise"):
        LogMel(8000, low=5000)
