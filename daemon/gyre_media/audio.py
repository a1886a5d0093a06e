"""Sound: from the bytes of a file to samples and to spectra over time; behind the extra `media`.

Between transforms a sound is float32 from -1 to 1, [n] where it has one channel, else
[n, channels].
"""

import io
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from gyre_daemon.transforms.recipes import Field, OfField, Sample, TooLarge, Transform
from msgspec import Meta

_Sound = npt.NDArray[np.float32]
# libsndfile reports a greater length than this for a FLAC file whose header has none.
_UNKNOWN = 1 << 60
_BLOCK = 1 << 20  # samples in one read of such a file
# The size in these headers must agree with the file: libsndfile serves a part of a cut one without
# an error. Programs that write to pipes leave larger sizes than `_MAX_SIZE`.
_SIZES = {b"RIFF": "<I", b"RIFX": ">I", b"FORM": ">I"}
_MAX_SIZE = 0x7FFF_0000
# The most bytes of decoded and resampled sound together. A process may allocate twice as much.
_MAX_BYTES = 1 << 30


class _Forward(soundfile.SoundFile):  # type: ignore[misc]
    """A file for one pass: after each read soundfile seeks, which some FLAC files cannot."""

    def seekable(self) -> bool:
        """False, as for a pipe."""
        return False


@dataclass(frozen=True)
class DecodeAudio(OfField):
    """Decodes WAV, FLAC, MP3, Ogg and other formats of libsndfile, whole or not at all.

    Attributes:
        field: the bytes of files, which samples no longer have afterwards.
        to: the sound, float32 [n], or [n, channels] where these are several.
        rate: in Hz, to which files of other rates are resampled.
        channels: 1 mixes those of a file; with others a file must have this number.
        max_seconds: a file that declares more is refused before it is decoded, and so is one that
            takes more than 1 GiB.
        quality: of resampling, as soxr names it.
    """

    version: ClassVar[int] = 3  # 2 read past the lengths of headers

    rate: Annotated[int, Meta(ge=100, le=1 << 20)]
    to: str = "audio"
    channels: Annotated[int, Meta(ge=1, le=64)] = 1
    max_seconds: Annotated[float, Meta(gt=0, le=24 * 3600)] = 600
    quality: Literal["QQ", "LQ", "MQ", "HQ", "VHQ"] = "HQ"

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        self.require_bytes(fields)
        more = () if self.channels == 1 else (self.channels,)
        return {self.to: Field(np.dtype(np.float32), (None, *more))}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        rate, sound = self.decoded(sample.pop(self.field).data)
        if self.channels == 1:
            sound = sound.mean(axis=1, dtype=np.float32)
        if rate != self.rate:
            sound = soxr.resample(sound, rate, self.rate, quality=self.quality)
        self.put(self.to, sound, sample, out)

    def decoded(self, data: memoryview) -> tuple[int, _Sound]:
        """The rate and the sound of a file, float32 [n, channels].

        Raises:
            ValueError: it is no sound that can be decoded, or cut, or too long.
        """
        _check_size(data)
        try:
            with _Forward(io.BytesIO(data)) as file:
                return file.samplerate, self._read(file)
        except soundfile.SoundFileError as error:
            reason = re.sub(r"Error opening <.*?>: ", "", str(error))
            raise ValueError(f"it is no sound that can be decoded: {reason}") from error

    def _read(self, file: Any) -> _Sound:
        """All of a file; the length that its header declares is looked at first."""
        if self.channels > 1 and file.channels != self.channels:
            raise ValueError(f"it has {file.channels} channels, and `channels` is {self.channels}")
        if file.frames >= _UNKNOWN:
            return self._read_blocks(file)
        num = file.frames
        self._check_length(num, file.samplerate, file.channels)
        sound: _Sound = file.read(num, "float32", always_2d=True)
        if not num or len(sound) < num:
            raise ValueError(f"it is cut: it ends after {len(sound)} of {num} samples")
        return sound

    def _read_blocks(self, file: Any) -> _Sound:
        """All of a file whose length is not known."""
        blocks, total = [np.empty((0, file.channels), np.float32)], 0
        while len(block := file.read(_BLOCK, "float32", always_2d=True)):
            blocks.append(block)
            total += len(block)
            self._check_length(total, file.samplerate, file.channels)
        return np.concatenate(blocks)

    def _check_length(self, num: int, rate: int, channels: int) -> None:
        if not 0 <= num <= self.max_seconds * rate:
            raise TooLarge(
                f"it declares {num} samples at {rate} Hz; at most {self.max_seconds:g} seconds "
                "are decoded (max_seconds)"
            )
        num_bytes = 4 * num * channels * (1 + self.rate / rate)
        if num_bytes > _MAX_BYTES:
            raise TooLarge(
                f"it declares {num} samples of {channels} channels at {rate} Hz, which take "
                f"{num_bytes:.0f} bytes at {self.rate} Hz and before; at most {_MAX_BYTES} are "
                "decoded"
            )


def _check_size(data: memoryview) -> None:
    """Refuse a file shorter than its header says."""
    form = _SIZES.get(bytes(data[:4]))
    if form and len(data) >= 8:
        size = struct.unpack_from(form, data, 4)[0] + 8
        if len(data) + 1 < size < _MAX_SIZE:  # a last odd byte may lack its padding
            raise ValueError(f"it is cut: its header says {size} bytes, and it has {len(data)}")


_Count = Annotated[int, Meta(ge=1, le=1 << 16)]
_Frequency = Annotated[float, Meta(ge=0, le=1 << 20)]


@dataclass(frozen=True)
class LogMel(Transform):
    """The logarithm of a mel spectrogram.

    As `torchaudio.transforms.MelSpectrogram` with its defaults: a periodic Hann window, frames
    around every `hop` samples with the sound mirrored at its ends, squared magnitudes, and
    triangles on the mel scale of HTK. Then the natural logarithm, of `floor` at least.

    Attributes:
        rate: of the sound, in Hz.
        field: the sound, float32 [n], which becomes float32 [mels, n // hop + 1], or [mels,
            (n - 1) // hop + 1] with an odd window.
        mels: how many triangles.
        window: of each spectrum, in samples.
        hop: from one spectrum to the next, in samples.
        low: where the first triangle begins, in Hz.
        high: where the last one ends, in Hz; 0 for half of `rate`.
        floor: lesser values count as this.
    """

    is_random: ClassVar[bool] = False

    rate: Annotated[int, Meta(ge=100, le=1 << 20)]
    field: str = "audio"
    mels: _Count = 80
    window: _Count = 400
    hop: _Count = 160
    low: _Frequency = 0.0
    high: _Frequency = 0.0
    floor: Annotated[float, Meta(gt=0)] = 1e-10

    def __post_init__(self) -> None:
        """Refuse frequencies that make no sense."""
        if not self.low < self._high <= self.rate / 2:
            raise ValueError(
                f"low is {self.low:g} Hz and high {self._high:g} Hz; they must rise, up to half of "
                f"rate, {self.rate / 2:g} Hz"
            )

    @property
    def inputs(self) -> Sequence[str]:
        return [self.field]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        before = fields[self.field]
        if before.dtype != np.float32 or len(before.shape) != 1:
            raise ValueError(f"{self.field!r:.100} is no sound of one channel, float32 [n]")
        (num,) = before.shape
        if num is None:
            raise ValueError(
                f"the samples of {self.field!r:.100} differ in length; put crop_or_pad before it"
            )
        if num <= self.window // 2:
            raise ValueError(f"{num} samples are too few for a window of {self.window}")
        num_frames = (num - self.window % 2) // self.hop + 1
        return {self.field: Field(before.dtype, (self.mels, num_frames))}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        sound = np.pad(sample[self.field], self.window // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(sound, self.window)[:: self.hop]
        spectra = np.abs(np.fft.rfft(frames * self._hann)) ** 2
        mels = np.maximum(spectra.astype(np.float32) @ self._triangles, np.float32(self.floor))
        self.put(self.field, np.log(mels).T, sample, out)

    @property
    def _high(self) -> float:
        return self.high or self.rate / 2

    @cached_property
    def _hann(self) -> npt.NDArray[np.float32]:
        angle = 2 * np.pi * np.arange(self.window) / self.window
        return (0.5 - 0.5 * np.cos(angle)).astype(np.float32)

    @cached_property
    def _triangles(self) -> npt.NDArray[np.float32]:
        """float32 [window // 2 + 1, mels], the weight of each frequency in each triangle."""
        frequencies = np.linspace(0, self.rate // 2, self.window // 2 + 1)
        low, high = (2595 * math.log10(1 + each / 700) for each in (self.low, self._high))
        corners = 700 * (10 ** (np.linspace(low, high, self.mels + 2) / 2595) - 1)
        widths, offsets = np.diff(corners), frequencies[:, None] - corners
        rising, falling = offsets[:, :-2] / widths[:-1], -offsets[:, 2:] / widths[1:]
        triangles: npt.NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling))
        return triangles.astype(np.float32)
