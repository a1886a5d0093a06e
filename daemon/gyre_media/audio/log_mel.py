"""Sounds as spectra over time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
import numpy.typing as npt
from gyre_daemon.transforms.transform import Field, Sample, Transform
from msgspec import Meta

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
        field: the sound, float32 [n], which becomes float32 [mels, n // hop + 1].
        mels: how many triangles.
        window: of each spectrum, in samples.
        hop: from one spectrum to the next, in samples.
        low: where the first triangle begins, in Hz.
        high: where the last one ends, in Hz; 0 for half of `rate`.
        floor: lesser values count as this.
    """

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
        """See `Transform.inputs`."""
        return [self.field]

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return False

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
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
        return {self.field: Field(before.dtype, (self.mels, num // self.hop + 1))}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
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
