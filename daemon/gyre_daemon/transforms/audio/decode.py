"""From the bytes of a sound file to its samples."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from msgspec import Meta

from gyre_daemon.transforms.transform import Field, OfField, Sample

# The header of an MP3 file says about how long it is; those of the others say it exactly.
_ESTIMATED = ("MP3", "MPEG")
# What decoded and resampled sound may take together. A process may allocate twice as much.
_MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class DecodeAudio(OfField):
    """Decodes WAV, FLAC, MP3, Ogg and what else libsndfile reads.

    Attributes:
        field: the bytes of files, which samples no longer have afterwards.
        to: the sound, float32 [n], or [n, channels] where these are several.
        rate: in Hz, to which files of other rates are resampled.
        channels: 1 mixes those of a file; with others a file must have this number.
        max_seconds: a file that declares more is refused before it is decoded, and so is one that
            takes more than 1 GiB.
        quality: of resampling, as soxr names it.
    """

    rate: Annotated[int, Meta(ge=100, le=1 << 20)]
    to: str = "audio"
    channels: Annotated[int, Meta(ge=1, le=64)] = 1
    max_seconds: Annotated[float, Meta(gt=0, le=24 * 3600)] = 600
    quality: Literal["QQ", "LQ", "MQ", "HQ", "VHQ"] = "HQ"

    @property
    def is_random(self) -> bool:
        """See `Transform.is_random`."""
        return False

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """See `Transform.outputs`."""
        self.require_bytes(fields)
        more = () if self.channels == 1 else (self.channels,)
        return {self.to: Field(np.dtype(np.float32), (None, *more))}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        """See `Transform.apply`."""
        try:
            with soundfile.SoundFile(io.BytesIO(sample.pop(self.field).data)) as file:
                rate, sound = file.samplerate, self._read(file)
        except soundfile.SoundFileError as error:
            raise ValueError(f"it is no sound that can be decoded: {error}") from error
        if self.channels == 1:
            sound = sound.mean(axis=1, dtype=np.float32)
        if rate != self.rate:
            sound = soxr.resample(sound, rate, self.rate, quality=self.quality)
        self.put(self.to, sound, sample, out)

    def _read(self, file: Any) -> npt.NDArray[np.float32]:
        """All of a file, float32 [n, channels]; its declared size is looked at first."""
        num, most = file.frames, self.max_seconds * file.samplerate
        if not 0 <= num <= most:
            raise ValueError(
                f"it declares {num} samples at {file.samplerate} Hz; at most {self.max_seconds:g} "
                "seconds are decoded (max_seconds)"
            )
        num_bytes = 4 * num * file.channels * (1 + self.rate / file.samplerate)
        if num_bytes > _MAX_BYTES:
            raise ValueError(
                f"it declares {num} samples of {file.channels} channels at {file.samplerate} Hz, "
                f"which take {num_bytes:.0f} bytes at {self.rate} Hz and before; at most "
                f"{_MAX_BYTES} are decoded"
            )
        if self.channels > 1 and file.channels != self.channels:
            raise ValueError(f"it has {file.channels} channels, and `channels` is {self.channels}")
        sound: npt.NDArray[np.float32] = file.read(num, "float32", always_2d=True)
        if len(sound) < num and file.format not in _ESTIMATED:
            raise ValueError(f"it ends after {len(sound)} of {num} samples")
        return sound
